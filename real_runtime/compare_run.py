"""A run as its folder tells it, and plans on other clusters. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from sim.errors import InputError
from sim.plan.plan import Plan
from sim.problem import Problem, load_problem
from sim.report.spans import Spans

__all__ = ["RunFacts", "moved", "read_events", "read_run"]

E = TypeVar("E")


class _Start(msgspec.Struct, frozen=True, kw_only=True):
    """What a comparison needs of the event with which a run began."""

    plan_hash: str
    dtype: str
    device: str
    ranks: Annotated[int, msgspec.Meta(ge=1)]
    seed: Annotated[int, msgspec.Meta(ge=0)]
    emulate: str = ""


class _Step(msgspec.Struct, frozen=True, kw_only=True):
    """And of a step. A number of seconds that no float holds is none."""

    seconds: Annotated[float, msgspec.Meta(gt=0, lt=1e9)]


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A run as read from its folder.

    Args:
        spans: measured, without the first step. step_times_s: [s] of all steps but the first.
        dtype, device, ranks, seed: of the run.
        only_first: the run had one step, and that is what the above is of.
    """

    spans: Spans
    step_times_s: tuple[float, ...]
    dtype: str
    device: str
    ranks: int
    seed: int
    only_first: bool = False


def read_run(folder: Path, plan: Plan) -> RunFacts:
    """Read what ``hetlab run --out`` left.

    Raises:
        InputError: no run's folder, an unfinished run, an emulation, or one of another plan; a
            file that is damaged.
    """
    events_file, spans_file = folder / "events.jsonl", folder / "spans.npz"
    if not events_file.is_file():
        raise InputError(
            "not the folder of a run", str(folder), expected="what hetlab run --out wrote"
        )
    events = read_events(events_file)
    begun = [i for i, e in enumerate(events) if e["event"] == "start"]
    if not begun:
        raise InputError("the run's log has no start", str(events_file))
    mine = events[begun[-1] :]
    start = _told(mine[0], _Start, events_file, begun[-1] + 1)
    if start.plan_hash != plan.hash:
        raise InputError(
            "the run belongs to another plan", str(folder), key="plan_hash",
            found=start.plan_hash, expected=plan.hash,
        )  # fmt: skip
    if start.emulate or any(e["event"] == "emulation" for e in mine):
        raise InputError(
            "the run was an emulation, whose times say nothing of its cluster", str(folder),
            expected="a run without --emulate",
        )  # fmt: skip
    if not spans_file.is_file():
        raise InputError("the run left no spans; it has not ended", str(folder))
    seconds = [
        _told(e, _Step, events_file, number).seconds
        for number, e in enumerate(mine, begun[-1] + 1)
        if e["event"] == "step"
    ]
    spans = Spans.load(spans_file)
    step = spans.columns["step"]
    if not len(spans) or not seconds:
        raise InputError("the run has no step", str(folder))
    if not all(np.isfinite(spans.columns[name]).all() for name in ("start_s", "end_s")):
        raise InputError("a span without start or end", str(spans_file), expected="finite times")
    # The first step warms up: memory is touched, connections are made.
    first = step.min()
    if step.max() > first:
        spans = spans.take(step > first)
    return RunFacts(
        spans=spans, step_times_s=tuple(seconds[1:] or seconds), dtype=start.dtype,
        device=start.device, ranks=start.ranks, seed=start.seed, only_first=len(seconds) == 1,
    )  # fmt: skip


def read_events(file: Path) -> list[dict[str, Any]]:
    """Read a run's log; the event of line n is number n - 1, and each says which "event" it is.

    Raises:
        InputError: it cannot be read, or a line is none of a log; names the line.
    """
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise InputError("cannot read the run's log", str(file), found=str(error)) from error
    found = []
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line.decode())
        except (ValueError, RecursionError):
            event = None
        if not isinstance(event, dict) or not isinstance(event.get("event"), str):
            raise InputError(
                "not a line of a run's log", str(file), number,
                found=ascii(line[:60].decode(errors="replace"))[1:-1],
                expected='a JSON object with an "event"',
            )  # fmt: skip
        found.append(event)
    return found


def _told(event: dict[str, Any], kind: type[E], file: Path, line: int) -> E:
    """An event's fields. Raises InputError: one is missing or of another type."""
    try:
        return msgspec.convert(event, kind)
    except msgspec.ValidationError as error:
        raise InputError(
            f"a broken {event['event']} in the run's log", str(file), line, found=str(error)
        ) from None


def moved(plan: Plan, cluster: str | Path | dict[str, Any]) -> tuple[Plan, Problem]:
    """The same plan on another cluster of as many chips, numbered alike.

    Raises:
        InputError: the cluster has too few chips, or is none.
    """
    documents = plan.problem
    problem = load_problem(cluster, documents["model"], documents["job"])
    machine, place = problem.machine, plan.placement
    chips = place.chips or tuple(range(place.num_ranks))
    if max(chips) >= machine.num_chips:
        raise InputError(
            "the plan uses more chips than the cluster has", str(machine.name), key="sites",
            found=f"{machine.num_chips} chips", expected=f"at least {max(chips) + 1}",
        )  # fmt: skip
    types = [n.accelerator for n in machine.nodes for _ in range(*n.chips)]
    cells = tuple(
        msgspec.structs.replace(c, accelerator=types[chips[c.ranks[0]]]) for c in place.cells
    )
    return msgspec.structs.replace(
        plan, placement=msgspec.structs.replace(place, cells=cells)
    ), problem
