"""hetlab validate and hetlab calibrate --from-runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sim.cli import main

FEW = "source = korth and pp <= 8"


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command."""
    with pytest.raises(SystemExit) as done:
        main(list(args))
    out, err = capsys.readouterr()
    code = done.value.code
    return (code if isinstance(code, int) else 1), out, err


def test_json_has_the_promised_shape(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = run(capsys, "validate", "--where", FEW, "--json")
    assert code == 0
    document = json.loads(out)
    assert set(document) == {"errors", "memory", "interval", "skipped"}
    keys = {"metric", "source", "subset", "n", "median_ape", "p90_ape", "bias", "spearman"}
    assert all(set(e) == keys for e in document["errors"])
    total = document["errors"][0]
    assert (total["metric"], total["source"], total["subset"], total["n"]) == (
        "time_like", "all", "all", 4,
    )  # fmt: skip
    assert 0 <= total["median_ape"] <= total["p90_ape"] < 0.15
    assert set(document["memory"]) == {
        "n", "median_ape", "p90_ape", "false_fits", "false_oom", "at_risk_share",
        "unscored_failures",
    }  # fmt: skip
    assert document["interval"]["nominal"] == 0.8
    assert document["interval"]["median_half_width"] > 0


def test_calibration_lowers_the_error(capsys: pytest.CaptureFixture[str]) -> None:
    medians = []
    for more in ([], ["--uncalibrated"]):
        _, out, _ = run(capsys, "validate", "--where", FEW, "--json", *more)
        medians.append(json.loads(out)["errors"][0]["median_ape"])
    assert medians[0] < medians[1] / 2


def test_report_needs_no_other_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    code, out, _ = run(capsys, "validate", "--where", FEW, "--report", str(target))
    assert code == 0 and "korth" in out
    page = target.read_text(encoding="utf-8")
    assert page.count("<circle") == 4
    assert not any(word in page for word in ("<script", "<link", "src=", "@import"))
    assert "korth-02-sel" in page


def test_a_skipped_run_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "validate", "--where", "source = gpurec", "--json")
    document = json.loads(out)
    assert {s["run_id"] for s in document["skipped"]} == {f"gpurec-0{i}" for i in range(1, 5)}
    assert all("type x count" in s["why"] for s in document["skipped"])
    assert document["errors"] == []


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (("--where", "colour = red"), "unknown column"),
        (("--held-out", "day"), "run, plan, model, source"),
        (("--uncalibrated", "--calibration", "x.json"), "different things"),
        (("--runs", "none.csv"), "cannot read"),
        (("--report", "out.txt"), ".html"),
    ],
)
def test_refuses(capsys: pytest.CaptureFixture[str], args: tuple[str, ...], word: str) -> None:
    code, _, err = run(capsys, "validate", *args)
    assert code != 0 and word in " ".join(err.split())


def test_calibrate_from_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A fit of one source, written and read again."""
    from sim.fidelity.runs import REQUIRED, read_runs

    rows = [
        {c: r.columns.get(c, "") for c in REQUIRED}
        | {"run_id": r.run_id, "measured_metric": v.metric, "value": str(v.value), "unit": v.unit}
        for r in read_runs()
        for v in r.values
        if r.source == "korth" and (r.integer("pp") or 99) <= 8
    ]
    file = tmp_path / "runs.csv"
    lines = [",".join(REQUIRED), *(",".join(row[c] for c in REQUIRED) for row in rows)]
    file.write_text("\n".join(lines) + "\n")
    out = tmp_path / "fit.json"
    code, text, _ = run(capsys, "calibrate", "--from-runs", str(file), "--out", str(out), "--json")
    assert code == 0 and json.loads(text)["runs"] == 4
    code, text, _ = run(
        capsys, "validate", "--runs", str(file), "--calibration", str(out), "--json"
    )
    assert json.loads(text)["errors"][0]["median_ape"] < 0.05
