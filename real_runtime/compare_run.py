"""A run as its folder tells it, and plans on other clusters. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from sim.errors import InputError
from sim.plan.plan import Plan
from sim.problem import Problem, load_problem
from sim.report.spans import Spans

__all__ = ["RunFacts", "moved", "read_run"]


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A run as read from its folder.

    Args:
        spans: measured, without the first step. step_times_s: [s] of all steps but the first.
        dtype, device, ranks, seed: of the run.
    """

    spans: Spans
    step_times_s: tuple[float, ...]
    dtype: str
    device: str
    ranks: int
    seed: int


def read_run(folder: Path, plan: Plan) -> RunFacts:
    """Read what ``hetlab run --out`` left.

    Raises:
        InputError: no run's folder, an unfinished run, or one of another plan.
    """
    events_file, spans_file = folder / "events.jsonl", folder / "spans.npz"
    if not events_file.is_file():
        raise InputError(
            "not the folder of a run", str(folder), expected="what hetlab run --out wrote"
        )
    events = _events(events_file)
    begun = [i for i, e in enumerate(events) if e.get("event") == "start"]
    if not begun:
        raise InputError("the run's log has no start", str(events_file))
    start = events[begun[-1]]
    if start.get("plan_hash") != plan.hash:
        raise InputError(
            "the run belongs to another plan", str(folder), key="plan_hash",
            found=str(start.get("plan_hash")), expected=plan.hash,
        )  # fmt: skip
    if any(e.get("event") == "emulation" for e in events[begun[-1] :]):
        raise InputError(
            "the run was an emulation, whose times say nothing of its cluster", str(folder),
            expected="a run without --emulate",
        )  # fmt: skip
    if not spans_file.is_file():
        raise InputError("the run left no spans; it has not ended", str(folder))
    seconds = [float(e["seconds"]) for e in events[begun[-1] :] if e.get("event") == "step"]
    spans = Spans.load(spans_file)
    step = spans.columns["step"]
    if not len(spans) or not seconds:
        raise InputError("the run has no step", str(folder))
    # The first step warms up: memory is touched, connections are made.
    first = step.min()
    if step.max() > first:
        spans = spans.take(step > first)
    return RunFacts(
        spans=spans, step_times_s=tuple(seconds[1:] or seconds), dtype=str(start["dtype"]),
        device=str(start["device"]), ranks=int(start["ranks"]), seed=int(start["seed"]),
    )  # fmt: skip


def _events(file: Path) -> list[dict[str, Any]]:
    found = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            raise InputError(
                "not a line of a run's log", str(file), number, found=line[:60], expected="JSON"
            ) from None
    return found


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
