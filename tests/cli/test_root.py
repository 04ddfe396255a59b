from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest
import typer

from sim import cli, doctor, root_command
from sim.errors import InfeasibleError, InputError, StoppedError, ThresholdError, UsageError

HEAVY = ("torch", "pandas", "scipy", "matplotlib", "ortools")


@pytest.fixture(autouse=True)
def logging_as_before():
    """The command line sets up logging for its process; other tests have theirs."""
    logger = logging.getLogger("hetlab")
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


def run_hetlab(*args: str) -> subprocess.CompletedProcess[str]:
    code = "from sim.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=60, check=False
    )


def test_help_loads_no_heavy_library():
    code = (
        "import sys\n"
        "from sim.cli import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit as e:\n    assert e.code == 0, e.code\n"
        f"print('LOADED', [m for m in {HEAVY!r} if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("LOADED []")
    assert "doctor" in done.stdout


def test_each_package_has_exactly_one_owner():
    assert doctor.package_owners() == dict.fromkeys(doctor.PACKAGES, ("hetlab",))


def test_version_and_usage_errors():
    done = run_hetlab("--version")
    assert (done.returncode, done.stdout) == (0, "hetlab 0.1.0\n")
    done = run_hetlab("no-such-verb")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "no-such-verb" in done.stderr


def test_doctor_prints_one_json_document():
    done = run_hetlab("doctor", "--json")
    document = json.loads(done.stdout)
    assert document["version"] == "0.1.0"
    assert {e["name"] for e in document["extras"]} >= {"runtime", "search"}
    assert done.returncode == (0 if all(c["ok"] for c in document["checks"]) else 1)


def app_raising(error: BaseException) -> typer.Typer:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.callback()(root_command._root)

    @app.command()
    def fail() -> None:
        raise error

    return app


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (
            InputError("unknown key", "a.yaml", 3, "job.x", "x", "y"),
            4,
            "a.yaml:3:job.x: unknown key",
        ),
        (InfeasibleError("nothing fits", "memory on T4"), 3, "bound by memory on T4"),
        (ThresholdError("step_time > 2 s"), 5, "step_time > 2 s"),
        (UsageError("--a contradicts --b"), 2, "--a contradicts --b"),
        (ValueError("oops"), 1, "unexpected ValueError: oops"),
        (KeyboardInterrupt(), 130, "stopped before there was a result"),
        (StoppedError("stopped before a plan was found"), 130, "before a plan was found"),
    ],
)
def test_errors_become_exit_codes_and_one_line(monkeypatch, capsys, error, code, text):
    monkeypatch.setattr(root_command, "build_app", lambda: app_raising(error))
    with pytest.raises(SystemExit) as stop:
        cli.main(["fail"])
    assert stop.value.code == code
    out, err = capsys.readouterr()
    assert out == ""
    assert text in err
    assert "Traceback" not in err


def test_a_result_before_ctrl_c_is_not_denied(monkeypatch, capsys):
    monkeypatch.setattr(root_command, "build_app", lambda: app_raising(typer.Exit(130)))
    with pytest.raises(SystemExit) as stop:
        cli.main(["fail"])
    assert stop.value.code == 130 and capsys.readouterr().err == ""


@pytest.mark.parametrize("wrapped", [False, True])
def test_ctrl_c_while_commands_are_imported(monkeypatch, capsys, wrapped):
    def stopped():
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            if wrapped:
                raise ImportError("an extension module gave up")  # noqa: B904 - as they do
            raise

    monkeypatch.setattr(root_command, "build_app", stopped)
    with pytest.raises(SystemExit) as stop:
        cli.main([])
    assert stop.value.code == 130
    assert capsys.readouterr().err == "hetlab: stopped before there was a result\n"


def test_nothing_heavy_is_imported_before_ctrl_c_is_awaited():
    code = (
        "import sys; from sim.cli import main\n"
        "print([m for m in ('typer', 'rich', 'numpy', 'msgspec', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("module", ["typer", "sim.cli_output", "strategies.cli", "numpy"])
def test_a_signal_during_an_import_ends_with_one_line(module):
    """The process sends itself SIGINT when it first imports a module."""
    code = (
        "import os, signal, sys\n"
        "class Watch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Watch())\n"
        "from sim.cli import main\n"
        "main(['plan', 'v100_t4', 'gpt2_355m', 'v100_t4'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "hetlab: stopped before there was a result\n"


def test_debug_adds_the_traceback(monkeypatch, capsys):
    monkeypatch.setattr(root_command, "build_app", lambda: app_raising(ValueError("oops")))
    with pytest.raises(SystemExit):
        cli.main(["--debug", "fail"])
    assert "Traceback" in capsys.readouterr().err


def test_a_broken_plugin_is_reported_and_the_rest_works(monkeypatch):
    class Entry:
        def __init__(self, name, load):
            self.name, self.value, self.load = name, f"x:{name}", load

    def missing():
        raise ModuleNotFoundError("No module named 'x'")

    called = []
    entries = [Entry("b", missing), Entry("a", lambda: called.append)]
    monkeypatch.setattr(root_command.metadata, "entry_points", lambda group: entries)
    app = typer.Typer()
    broken = root_command.load_plugins(app, "hetlab.commands")
    assert called == [app]
    assert len(broken) == 1
    assert "hetlab.commands: b (x:b): ModuleNotFoundError" in broken[0]
