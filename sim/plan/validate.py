"""Prove a plan well formed, over prologue, two repeats and epilogue, without a clock."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from sim.errors import PlanError
from sim.plan.flat import flatten
from sim.plan.fold import fold_plan, relations
from sim.plan.fresh import prove_fresh
from sim.plan.gradients import prove_updates
from sim.plan.graph import build_graph
from sim.plan.hosted import prove_hosted
from sim.plan.kinds import KINDS
from sim.plan.op import Op
from sim.plan.order import find_cycle
from sim.plan.passes import expand
from sim.plan.plan import Plan
from sim.plan.program import Program, walk
from sim.plan.servers import check_servers
from sim.plan.structure import check_belongs, check_structure
from sim.plan.tables import resolve_tables
from sim.plan.wiring import Wiring, wire
from sim.problem import Problem, problem_from_documents

__all__ = ["validate"]

Key = tuple[int, int, int, str]


def validate(plan: Plan, problem: Problem | None = None) -> None:
    """Check every rule of the plan format.

    Proves: every block is placed once per replica; each (microbatch, part, segment) of a cell has
    one F, one recomputation if and only if that F drops activations, then B, or I and W; each
    gradient is reduced once and applied once, after all of it is there; only inexact plans read
    whatever version there is, or compute before an update of the step before; members list the
    same order and nothing waits in a circle with the declared buffers; live activations and
    gathered parameters are back where they were after every step; what segments keep on the host
    and replicas share is moved by ops (sim.plan.hosted). With a problem, also that its model is
    placed whole and that amounts are the model's.

    Args:
        plan: to check. problem: what it is for; None takes the one the plan carries, if any.

    Raises:
        PlanError: the first rule that is broken, with the rank and the op.
        InputError: the problem the plan carries is broken.
    """
    check_structure(plan)
    if problem is None and plan.problem:
        problem = problem_from_documents(plan.problem)
    if problem is not None:
        check_belongs(plan, problem)
    programs, wiring = expand(plan), wire(plan.placement)
    _ranks(plan, programs)
    check_servers(plan.placement, programs)
    for program in programs:
        rank = program.ranks[0]
        ops = list(walk(program))
        _versions(plan, program)
        cell = wiring.cell_of.get(rank)
        if cell is None or not any(op.kind == "F" for op in ops):
            continue
        microbatches = plan.placement.microbatches
        _passes(rank, ops, wiring, microbatches[cell.replica] if microbatches else 1)
        _updates(rank, ops, wiring)
        _transfers(plan, rank, ops, wiring)
    late = max((op.carried for p in programs for op in walk(p)), default=0)
    graph = build_graph(programs, wiring, 2 + late, _classes(plan, programs, wiring), plan.buffers)
    cycle = find_cycle(graph)
    if cycle:
        names = " <- ".join(graph.label(node) for node in cycle[:6])
        raise PlanError(
            f"ops wait for one another in a circle with {plan.buffers} buffers",
            key="programs",
            found=names,
            expected="an order in which every op can start",
        )
    prove_updates(graph, wiring)
    prove_hosted(plan, programs, wiring)
    if plan.exact:
        prove_fresh(graph)


def _classes(plan: Plan, programs: tuple[Program, ...], wiring: Wiring) -> list[int] | None:
    """Fold equal ranks, unless ranks of one class talk to each other: a circle would be hidden."""
    classes = fold_plan(plan, programs, wiring, resolve_tables(plan.tables, 2))
    flats = [flatten(p).talkers for p in programs]
    pairs, _ = relations(wiring, flats, [p.ranks for p in programs])
    return None if any(classes[a] == classes[b] for _, a, b in pairs) else classes


def _ranks(plan: Plan, programs: tuple[Program, ...]) -> None:
    covered = Counter(r for p in programs for r in p.ranks)
    missing = set(range(plan.placement.num_ranks)) - set(covered)
    twice = [r for r, n in covered.items() if n > 1]
    if missing or twice:
        raise PlanError(
            "every rank has exactly one program",
            key="programs",
            found=f"rank {min(missing)} has none" if missing else f"rank {twice[0]} has two",
        )


def _versions(plan: Plan, program: Program) -> None:
    handled = {id(op) for b in program.blocks if b.form == "on" for op in b.items}
    for op in walk(program):
        if op.reads and plan.exact:
            raise PlanError(
                f"{op.name} reads {op.reads}, which changes the mathematics",
                key="exact",
                found="true",
                expected="false with a reason",
            )
        if op.reads and id(op) not in handled:
            raise PlanError(f"{op.name} reads {op.reads} outside an on block", key="programs")
        if op.slack >= 0 and not (id(op) in handled and op.reads):
            raise PlanError(f"{op.name} has slack and answers no PULL", key="programs")
        if op.kind not in KINDS:
            raise PlanError("unknown op kind", key="programs", found=op.kind)


def _passes(rank: int, ops: list[Op], wiring: Wiring, microbatches: int) -> None:
    """One F, then its recomputation, B, or I and W, for each (stage, microbatch, part, segment)."""
    seen: dict[str, dict[Key, list[tuple[int, Op]]]] = defaultdict(lambda: defaultdict(list))
    for i, op in enumerate(ops):
        if op.kind in ("F", "R", "B", "I", "W"):
            seen[op.kind][wiring.stage_of(op, rank), op.mb, op.part, op.label].append((i, op))
    forward = seen["F"]
    numbers = {k[1] for k in forward} - {-1}
    if numbers and numbers != set(range(microbatches)):
        raise PlanError(
            f"rank {rank} does not run every microbatch",
            key="programs",
            found=f"microbatches {_ranges(numbers)}",
            expected=f"0 to {microbatches - 1}",
        )
    stages = {k[0] for k in forward}
    if wiring.stages(rank) and stages - {-1} != wiring.stages(rank):
        raise PlanError(
            f"rank {rank} does not run the stages it hosts",
            key="programs",
            found=f"stages {_ranges(stages)}",
            expected=f"stages {_ranges(wiring.stages(rank))}",
        )
    for kind in ("R", "B", "I", "W"):
        for key in seen[kind]:
            if key not in forward:
                raise PlanError(
                    f"rank {rank}: {seen[kind][key][0][1].name} has no F", key="programs"
                )
    for key, hits in forward.items():
        _one_pass(rank, key, hits, seen)
    _same_parts(rank, forward)


def _one_pass(
    rank: int,
    key: Key,
    hits: list[tuple[int, Op]],
    seen: dict[str, dict[Key, list[tuple[int, Op]]]],
) -> None:
    first, op = hits[0]
    if len(hits) != 1:
        raise PlanError(
            f"rank {rank}: {op.name} runs {len(hits)} times in a step",
            key="programs",
            expected="once",
        )
    backward, dgrad, wgrad = (seen[k].get(key, []) for k in ("B", "I", "W"))
    if (len(backward), len(dgrad), len(wgrad)) not in ((1, 0, 0), (0, 1, 1)):
        raise PlanError(
            f"rank {rank}: {op.name} needs one B, or one I and one W",
            key="programs",
            found=f"{len(backward)} B, {len(dgrad)} I, {len(wgrad)} W",
        )
    again = len(seen["R"].get(key, [])) + sum(o.recompute == "inner" for _, o in backward + dgrad)
    wanted = 0 if op.saves == "all" else 1
    if again != wanted:
        raise PlanError(
            f"rank {rank}: {op.name} saves {op.saves} and is recomputed {again} times",
            key="programs",
            expected=f"{wanted} recomputation, as R or inside B",
        )
    order = [
        first,
        *(i for i, _ in seen["R"].get(key, [])),
        *(i for i, _ in backward + dgrad + wgrad),
    ]
    if order != sorted(order):
        raise PlanError(
            f"rank {rank}: {op.name} comes after its recomputation or backward", key="programs"
        )


def _same_parts(rank: int, forward: Iterable[Key]) -> None:
    """Every microbatch of a stage has the same segments in the same number of parts."""
    shapes: dict[tuple[int, int], set[tuple[int, str]]] = defaultdict(set)
    for stage, mb, part, label in forward:
        shapes[stage, mb].add((part, label))
    first: dict[int, set[tuple[int, str]]] = {}
    for (stage, mb), shape in sorted(shapes.items()):
        parts = {p for p, _ in shape}
        whole = parts == {-1} or parts == set(range(len(parts)))
        if first.setdefault(stage, shape) != shape or not whole:
            raise PlanError(
                f"rank {rank}: microbatch {mb} of stage {stage} misses a part or a segment",
                key="programs",
                found=str(sorted(shape)),
                expected=str(sorted(first[stage])),
            )


def _updates(rank: int, ops: list[Op], wiring: Wiring) -> None:
    """Each stage's gradient is applied; gathered parameters are dropped as often."""
    count: Counter[tuple[str, int]] = Counter(
        (op.kind, wiring.stage_of(op, rank))
        for op in ops
        if op.kind in ("OPT", "UNSHARD", "RESHARD")
    )
    gathered = sum(n for k, n in count.items() if k[0] == "UNSHARD")
    dropped = sum(n for k, n in count.items() if k[0] == "RESHARD")
    if dropped and gathered != dropped:
        raise PlanError(
            f"rank {rank}: gathered parameters are not dropped as often",
            key="programs",
            found=f"{gathered} UNSHARD, {dropped} RESHARD",
        )
    stages = {wiring.stage_of(op, rank) for op in ops if op.kind == "F"}
    sends = any(op.kind == "PUSH" for op in ops)
    for stage in stages:
        if not sends and not count["OPT", stage] and not count["OPT", -1]:
            raise PlanError(
                f"rank {rank}: the gradient of stage {stage} is never applied",
                key="programs",
                expected=f"{stage}OPT",
            )


def _transfers(plan: Plan, rank: int, ops: list[Op], wiring: Wiring) -> None:
    """Every microbatch that runs crosses every boundary of the rank's stages, both ways."""
    position = {s.stage: s.cell for s in plan.placement.segments}
    ran: dict[int, set[int]] = defaultdict(set)
    sent: dict[tuple[str, int, str], set[int]] = defaultdict(set)
    for op in ops:
        if op.kind == "F":
            ran[wiring.stage_of(op, rank)].add(op.mb)
        elif op.kind.startswith(("SEND_", "RECV_")) and op.peer < 0:
            sent[op.kind, wiring.stage_of(op, rank), op.label].add(op.mb)
    for b in plan.placement.boundaries:
        if position[b.src] == position[b.dst]:
            continue
        for stage, kinds in ((b.src, ("SEND_F", "RECV_B")), (b.dst, ("RECV_F", "SEND_B"))):
            for kind in kinds:
                if kind.endswith("_B") and not b.gradient:
                    continue
                missing = ran.get(stage, set()) - sent[kind, stage, b.name]
                if missing:
                    raise PlanError(
                        f"rank {rank}: microbatch {min(missing)} of stage {stage} has no {kind}",
                        key="programs",
                        expected=f"one {kind} per microbatch over {b.src} -> {b.dst}",
                    )


def _ranges(numbers: Iterable[int]) -> str:
    return " ".join(map(str, sorted(numbers)))
