"""Everything wrong with files people wrote, by what each file is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

import msgspec

from sim.errors import InputError
from sim.hardware.catalog import Catalog, ProfileKind, bundled_catalog
from sim.hardware.check import inherit_ports, machine_problems
from sim.hardware.plausible import implausible
from sim.model.load import load_model_source
from sim.plan.io import load_plan, plan_from_json
from sim.plan.plan import Plan
from sim.plan.validate import validate as validate_plan
from sim.problem import Problem, problem_from_documents
from sim.spec.cluster import ClusterDoc
from sim.spec.job import JobDoc, job_from_doc
from sim.spec.load import MAX_FILE_BYTES, Source, problems_of, read_source, validate
from sim.spec.measured import MeasuredDoc
from sim.spec.profiles import AcceleratorDoc, LinkDoc, NodeDoc, ProcessorDoc

__all__ = [
    "FileCheck",
    "ProblemRow",
    "check_file",
    "check_profiles",
    "in_file",
    "kind_of",
    "read_plan",
]

_SIGNS = {
    "plan": ("placement",),
    "cluster": ("sites",),
    "job": ("global_batch",),
    "model": ("model_type", "text_config", "blocks", "architectures", "num_hidden_layers"),
    "accelerator": ("peaks",),
    "node": ("chips",),
    "host": ("cores",),
    "link": ("rate",),
}
"""Kind -> keys that only it has."""
_PROFILES: dict[str, type[AcceleratorDoc | NodeDoc | ProcessorDoc | LinkDoc]] = {
    "accelerator": AcceleratorDoc, "node": NodeDoc, "host": ProcessorDoc, "link": LinkDoc,
}  # fmt: skip


class ProblemRow(msgspec.Struct, frozen=True):
    """One problem; fields as in ``sim.errors.InputError``, ``text`` is all of it."""

    text: str
    file: str
    line: int
    key: str
    message: str
    found: str
    expected: str


class FileCheck(msgspec.Struct, frozen=True):
    """What ``hetlab check`` says about a file.

    Args:
        file: as given. kind: "plan", "cluster", "job", "model", a kind of profile, or "" when the
            file could not be read or is none of them. error: the first problem's text, or "".
        problems: all of them.
    """

    file: str
    kind: str
    error: str
    problems: tuple[ProblemRow, ...]


def check_file(file: Path, bundled: Catalog | None = None) -> FileCheck:
    """Check one file by what it is.

    Args:
        file: what to check. bundled: a profile is held to what the bundled ones are held to
            (every number has a source), and names others of this catalogue.
    """
    kind, source = "", Source({}, str(file))
    try:
        if file.suffix == ".json" and file.is_file() and file.stat().st_size > MAX_FILE_BYTES:
            kind = "plan"  # no other kind of file may be that large
        else:
            source = read_source(file)
            kind = kind_of(source)
        problems = _problems(kind, source, file, bundled)
    except InputError as error:
        problems = [error]
    rows = []
    for p in (in_file(p, str(file), source) for p in problems):
        rows.append(ProblemRow(str(p), p.file, p.line, p.key, p.message, p.found, p.expected))
    return FileCheck(str(file), kind, rows[0].text if rows else "", tuple(rows))


def check_profiles(names: Sequence[str], catalog: Catalog) -> list[FileCheck]:
    """Check profiles of a catalogue, or files.

    Args:
        names: of profiles, whatever their kind, or paths of files; () for the whole catalogue.
        catalog: where profiles lie.

    Raises:
        InputError: neither a profile nor a file.
    """
    every = {k: catalog.names(k) for k in get_args(ProfileKind)}
    files = [catalog.file(k, n) for k, known in every.items() for n in known if not names]
    for name in names:
        named = [catalog.file(k, name) for k, known in every.items() if name in known]
        if not named and not Path(name).is_file():
            raise InputError("neither a profile nor a file", key="name", found=name)
        files += named or [Path(name)]
    return [check_file(file, catalog) for file in files]


def _problems(
    kind: str, source: Source, file: Path, bundled: Catalog | None
) -> Sequence[InputError]:
    """All problems of a file; raises the only one where it cannot have several."""
    if kind == "plan":
        plan = load_plan(file)
        if plan.problem:
            problem_from_documents(plan.problem)
        validate_plan(plan)
    elif kind == "cluster":
        catalog = bundled or bundled_catalog()
        source = inherit_ports(source, catalog)
        found = problems_of(ClusterDoc, source)
        return found or machine_problems(validate(ClusterDoc, source), source, catalog)
    elif kind == "job":
        return problems_of(JobDoc, source) or _raised(
            lambda: job_from_doc(validate(JobDoc, source))
        )
    elif kind in _PROFILES:
        found = problems_of(_PROFILES[kind], source)
        if found:
            return found
        known = bundled or bundled_catalog()
        return implausible(validate(_PROFILES[kind], source), known, sources=bundled is not None)
    elif "times" in source.data or "blocks" in source.data:
        return problems_of(MeasuredDoc, source) or _raised(lambda: load_model_source(source))
    else:
        load_model_source(source)
    return []


def _raised(work: Callable[[], object]) -> list[InputError]:
    try:
        work()
    except InputError as error:
        return [error]
    return []


def in_file(error: InputError, file: str, source: Source | None = None) -> InputError:
    """Give an error the file it is about, and the line of its key, where it lacks them.

    Args:
        error: as raised; the documents inside a plan call themselves "problem.cluster" and so on.
        file: what was read. source: its content, for lines.
    """
    key, line = error.key, error.line
    if error.file.startswith("problem."):
        key, line = ".".join(p for p in (error.file, key) if p), 0
    elif error.file and error.file != file:
        return error
    if not line and source is not None:
        line = source.line(tuple(int(p) if p.isdigit() else p for p in key.split(".")))
    return type(error)(error.message, file, line, key, error.found, error.expected)


def kind_of(source: Source) -> str:
    """What a document is, by the keys only that kind has.

    Raises:
        InputError: none of them.
    """
    for kind, keys in _SIGNS.items():
        if any(k in source.data for k in keys):
            return kind
    raise InputError(
        "neither a plan, a cluster, a job, a model nor a profile",
        file=source.file,
        line=1,
        found="keys " + ", ".join(list(map(str, source.data))[:6]),
        expected="one of " + ", ".join(k for keys in _SIGNS.values() for k in keys),
    )


def read_plan(file: Path) -> tuple[Plan, Problem | None]:
    """Read a plan file and prove it well formed; also gives the problem it carries, if any.

    Args:
        file: "-" reads standard input.

    Raises:
        InputError: it is another kind of file, or a broken plan.
    """
    if str(file) == "-":
        name, plan = "standard input", plan_from_json(sys.stdin.buffer.read(), "standard input")
    else:
        name = str(file)
        try:
            plan = load_plan(file)
        except InputError:
            _refuse_other(file)
            raise
        if not plan.placement.num_ranks:
            _refuse_other(file)
    try:
        problem = problem_from_documents(plan.problem) if plan.problem else None
        validate_plan(plan, problem)
    except InputError as error:
        raise in_file(error, name) from None
    return plan, problem


def _refuse_other(file: Path) -> None:
    """Say what a file that is no plan is, if it can be told."""
    try:
        kind = kind_of(read_source(file))
    except InputError:
        return
    if kind != "plan":
        article = "an" if kind == "accelerator" else "a"
        raise InputError(
            f"this is {article} {kind} file, not a plan",
            file=str(file),
            expected="a plan, as hetlab plan CLUSTER MODEL JOB -o plan.json writes it",
        )
