"""What must hold of a plan before its programs are looked at: sizes, grid, blocks, its problem."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from sim.errors import PlanError
from sim.plan.layers import SEGMENTS
from sim.plan.lower import amounts_of, boundaries_of
from sim.plan.numbers import check_amounts
from sim.plan.op import is_label
from sim.plan.passes import MAX_MICROBATCHES, PASSES, find_pass
from sim.plan.placement import Segment
from sim.plan.plan import Plan
from sim.plan.schedules import SCHEDULES
from sim.problem import Problem

__all__ = ["check_belongs", "check_structure"]

MAX_RANKS = 1_000_000
"""Most ranks that are laid out: a plan file must not be able to exhaust memory."""


def check_structure(plan: Plan) -> None:
    """Check exactness, sizes, the grid of cells, segments, boundaries and lowering arguments.

    Raises:
        PlanError: the first thing that is wrong.
    """
    _exactness(plan)
    _sizes(plan)
    _grid(plan)
    _segments(plan)
    _kept(plan)
    _lowering(plan)
    check_amounts(plan.amounts)


def check_belongs(plan: Plan, problem: Problem) -> None:
    """Check that a plan is for a problem: its mathematics, model, batch, chips and amounts.

    Raises:
        PlanError: the first thing that differs.
    """
    job, math, placement = problem.job, plan.mathematics, plan.placement
    _same("problem_hash", plan.problem_hash or problem.hash, problem.hash)
    if not plan.exact and not job.limits.allow_inexact:
        raise PlanError(
            f"the plan changes the mathematics ({plan.reason}) and its job does not allow it",
            key="job.limits.allow_inexact", found="false", expected="true to allow it",
        )  # fmt: skip
    for name in ("global_batch", "sequence_length", "dtype", "reduction_dtype", "optimizer"):
        _same(f"mathematics.{name}", getattr(math, name), getattr(job, name))
    if placement.microbatches:
        total = sum(placement.microbatches) * math.microbatch
        _same("placement.microbatches", f"{total} sequences", f"{job.global_batch} sequences")
    _chips(plan, problem)
    segments = placement.segments
    placed = max((s.blocks[1] for s in segments), default=0)
    if not placed:
        return
    _same("placement.segments", f"{placed} blocks", f"{len(problem.model.blocks)} blocks")
    _same("placement.boundaries", placement.boundaries, boundaries_of(problem.model, segments))
    for key, amount in amounts_of(problem, placement, math.microbatch).items():
        if key in plan.amounts:
            _same(f"amounts.{key}", plan.amounts[key], amount)


def _same(key: str, found: object, expected: object) -> None:
    if found != expected:
        raise PlanError(
            "the plan does not belong to its problem", key=key, found=str(found),
            expected=str(expected),
        )  # fmt: skip


def _chips(plan: Plan, problem: Problem) -> None:
    machine, placement = problem.machine, plan.placement
    chips: Sequence[int] = placement.chips or range(placement.num_ranks)
    if max(chips, default=-1) >= machine.num_chips:
        raise PlanError(
            "the plan uses a chip the machine lacks", key="placement.chips",
            found=str(max(chips)), expected=f"0 to {machine.num_chips - 1}",
        )  # fmt: skip
    types = [n.accelerator for n in machine.nodes for _ in range(*n.chips)]
    for cell in placement.cells:
        have = {types[chips[r]] for r in cell.ranks}
        if have != {cell.accelerator}:
            raise PlanError(
                f"cell ({cell.stage}, {cell.replica}) sits on other accelerators than it names",
                key="placement.cells", found=", ".join(sorted(have)),
                expected=cell.accelerator or "the name of its accelerator",
            )  # fmt: skip


def _exactness(plan: Plan) -> None:
    if not plan.exact and not plan.reason:
        raise PlanError("an inexact plan must say why", key="reason", expected="a reason")
    if plan.exact and plan.placement.workers:
        raise PlanError(
            "workers that take steps of their own change the mathematics",
            key="exact",
            found="true",
            expected="false with a reason",
        )
    if plan.exact and plan.reason:
        raise PlanError(
            "an exact plan has no reason to be inexact", key="reason", found=plan.reason
        )


def _sizes(plan: Plan) -> None:
    """Every number is in its range."""
    math, placement = plan.mathematics, plan.placement
    if plan.buffers < 0:
        raise PlanError(
            "buffers cannot be negative", key="buffers", found=str(plan.buffers), expected=">= 0"
        )
    positive = {
        "mathematics.global_batch": math.global_batch,
        "mathematics.sequence_length": math.sequence_length,
        "mathematics.microbatch": math.microbatch,
        "placement.ep": placement.ep,
        "placement.parameter_buffers": placement.parameter_buffers,
        "placement.gradient_buffers": placement.gradient_buffers,
        "placement.nvme_buffers": placement.nvme_buffers,
    }
    positive |= {f"cells[{i}].tp": c.tp for i, c in enumerate(placement.cells)}
    positive |= {f"cells[{i}].cp": c.cp for i, c in enumerate(placement.cells)}
    positive |= {f"placement.microbatches[{r}]": m for r, m in enumerate(placement.microbatches)}
    for key, value in positive.items():
        if value < 1:
            raise PlanError("a size must be positive", key=key, found=str(value), expected=">= 1")
    by_segment = not plan.lowering or any(call.name == SEGMENTS for call in plan.lowering)
    if math.zero in (2, 3) and not by_segment:
        raise PlanError(
            "ZeRO-2 and 3 are lowered segment by segment", key="lowering",
            found=" ".join(c.name for c in plan.lowering), expected=f"the pass {SEGMENTS}",
        )  # fmt: skip
    if math.zero not in (0, 1, 2, 3):
        raise PlanError(
            "unknown ZeRO stage", key="mathematics.zero", found=str(math.zero), expected="0 to 3"
        )
    most = max(placement.microbatches, default=0)
    if most > MAX_MICROBATCHES or placement.num_ranks > MAX_RANKS:
        raise PlanError(
            "the plan is too large",
            key="placement",
            found=f"{placement.num_ranks} ranks, {most} microbatches",
            expected=f"at most {MAX_RANKS} ranks and {MAX_MICROBATCHES} microbatches",
        )
    if min(placement.chips, default=0) < 0:
        raise PlanError(
            "a chip index is negative", key="placement.chips", found=str(min(placement.chips))
        )


def _grid(plan: Plan) -> None:
    """Every (stage, replica) has one cell, every rank one cell, every cell tp x cp ranks."""
    placement = plan.placement
    ranks = [r for c in placement.cells for r in c.ranks] + list(placement.extra_ranks)
    if not ranks:
        raise PlanError("a plan needs at least one rank", key="placement.cells", found="none")
    if sorted(ranks) != list(range(len(ranks))):
        raise PlanError(
            "every rank belongs to exactly one cell", key="placement.cells",
            found=f"{len(ranks)} entries", expected=f"ranks 0 to {len(set(ranks)) - 1}, each once",
        )  # fmt: skip
    for cell in placement.cells:
        if cell.tp * cell.cp != len(cell.ranks):
            raise PlanError(
                f"cell ({cell.stage}, {cell.replica}): tp x cp must be its number of ranks",
                key="placement.cells", found=f"{cell.tp} x {cell.cp} for {len(cell.ranks)} ranks",
                expected=str(len(cell.ranks)),
            )  # fmt: skip
    count = Counter((c.stage, c.replica) for c in placement.cells)
    grid = {(s, r) for s in range(placement.num_stages) for r in range(placement.num_replicas)}
    if set(count) != grid or any(n > 1 for n in count.values()):
        odd = sorted(grid ^ set(count)) or sorted(k for k, n in count.items() if n > 1)
        raise PlanError(
            "all replicas have the same stages: every (stage, replica) needs exactly one cell",
            key="placement.cells", found=f"{count[odd[0]]} cells at {odd[0]}", expected="1",
        )  # fmt: skip
    if placement.microbatches and len(placement.microbatches) != placement.num_replicas:
        raise PlanError(
            "one number of microbatches per replica", key="placement.microbatches",
            found=str(len(placement.microbatches)), expected=str(placement.num_replicas),
        )  # fmt: skip
    workers = placement.workers
    if workers and (min(workers) < 1 or sum(workers) != placement.num_replicas):
        raise PlanError(
            "every replica belongs to one worker", key="placement.workers",
            found=" + ".join(map(str, workers)), expected=f"{placement.num_replicas} replicas",
        )  # fmt: skip
    chips = placement.chips
    own = [chips[r] for c in placement.cells for r in c.ranks if r < len(chips)]
    if chips and (len(chips) != len(ranks) or len(set(own)) != len(own)):
        raise PlanError(
            "one chip per rank, each used once by the cells", key="placement.chips",
            found=f"{len(chips)} chips", expected=f"{len(ranks)}",
        )  # fmt: skip


def _segments(plan: Plan) -> None:
    """Segments sit in the grid and partition the blocks; boundaries join their stages, forwards."""
    placement = plan.placement
    for s in placement.segments:
        if not 0 <= s.cell < placement.num_stages or s.stage < 0:
            raise PlanError(
                "a segment sits outside the grid", key="placement.segments",
                found=f"stage {s.stage} in cell {s.cell}",
                expected=f"cells 0 to {placement.num_stages - 1}",
            )  # fmt: skip
    stages = {s.stage for s in placement.segments}
    for b in placement.boundaries:
        if b.src not in stages or b.dst not in stages or b.src >= b.dst:
            raise PlanError(
                "a boundary joins two stages, forwards", key="placement.boundaries",
                found=f"{b.src} -> {b.dst}", expected=f"stages of {sorted(stages)}",
            )  # fmt: skip
    spans = sorted(s.blocks for s in placement.segments)
    if not any(spans) or all(s == (0, 0) for s in spans):
        return
    if [s.blocks for s in placement.segments] != spans and _finer(placement.segments):
        raise PlanError(
            "segments come in the order of their blocks", key="placement.segments",
            found=" ".join(f"{a}-{b}" for a, b in (s.blocks for s in placement.segments)),
        )  # fmt: skip
    expected = 0
    for first, last in spans:
        if first != expected or last <= first:
            raise PlanError(
                "every block is placed once", key="placement.segments",
                found=f"blocks {first} to {last - 1}",
                expected=f"a segment that starts at block {expected}",
            )  # fmt: skip
        expected = last


def _finer(segments: Sequence[Segment]) -> bool:
    return len({s.stage for s in segments}) < len(segments)


def _kept(plan: Plan) -> None:
    """A stage sits in one place, its segments have names of their own, and can be said to live."""
    place: dict[int, int] = {}
    seen: set[tuple[int, str]] = set()
    for s in plan.placement.segments:
        where = f"segment {s.name or s.blocks} of stage {s.stage}"
        if place.setdefault(s.stage, s.cell) != s.cell:
            raise PlanError(
                f"{where} sits in another cell than its stage", key="placement.segments",
                found=str(s.cell), expected=str(place[s.stage]),
            )  # fmt: skip
        if (s.stage, s.name) in seen or not is_label(s.name):
            raise PlanError(
                f"{where} needs a name of its own", key="placement.segments", found=repr(s.name),
                expected="one that no other has, without spaces and ]",
            )  # fmt: skip
        seen.add((s.stage, s.name))
        twice = len(set(s.offload)) < len(s.offload)
        if twice or ("nvme" in s.offload and "optimizer" not in s.offload):
            raise PlanError(
                f"{where} is twice on the host" if twice
                else f"{where} is on NVMe and its optimizer is not on the host",
                key="placement.segments", found=" ".join(s.offload),
                expected="parameters and optimizer once each; nvme beside optimizer",
            )  # fmt: skip


def _lowering(plan: Plan) -> None:
    """Passes are installed and take what the calls say, each once, and a generator comes first."""
    if not plan.lowering:
        return
    names = [call.name for call in plan.lowering]
    for i, call in enumerate(plan.lowering):
        find_pass(call)
        if call.name in names[:i] or (call.name == "schedule" and i):
            raise PlanError(
                f"the lowering pass {call.name} would undo what stands before it",
                key="lowering", found=" ".join(names),
                expected=f"{call.name} once" + (", and first" if call.name == "schedule" else ""),
            )  # fmt: skip
    first = plan.lowering[0]
    if first.name in PASSES and first.name != "schedule":
        raise PlanError(
            "the lowering starts with a generator",
            key="lowering",
            found=first.name,
            expected="schedule",
        )
    name = first.args.get("name", "1f1b")
    if first.name == "schedule" and not first.args.get("order") and name not in SCHEDULES:
        raise PlanError(
            "unknown schedule", key="lowering", found=name, expected=" ".join(sorted(SCHEDULES))
        )
