"""Refuse before launch, by name, what this runtime does not run."""

from __future__ import annotations

from importlib.metadata import entry_points

from real_runtime.errors import UnsupportedPlanError
from real_runtime.model.config import read_config
from real_runtime.program import check_form, refused
from sim.plan.deps import EXPERTS
from sim.plan.passes import expand
from sim.plan.plan import Plan
from sim.plan.program import walk
from sim.plan.validate import validate
from sim.problem import Problem, problem_from_documents

__all__ = ["HANDLERS", "KINDS", "check_supported", "known_kinds"]

KINDS = frozenset({
    "F", "B", "I", "W", "R", "OPT", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "ALL_GATHER",
    "ALL_REDUCE", "REDUCE_GRAD", "UNSHARD", "BARRIER",
})  # fmt: skip
"""Op kinds with a handler in real_runtime.executor."""

HANDLERS = "hetlab.handlers"
"""Entry-point group of further kinds: the name is the kind, the value a function of
(executor, node) that does the op's work on the rank's compute stream."""

OPTIMIZERS = ("adam", "adamw", "sgd")


def known_kinds() -> frozenset[str]:
    """Op kinds that have a handler, those of installed strategies included."""
    return KINDS | {entry.name for entry in entry_points(group=HANDLERS)}


def check_supported(plan: Plan) -> Problem:
    """Check a plan before anything starts.

    Args:
        plan: to run.

    Returns:
        The problem that the plan carries.

    Raises:
        UnsupportedPlanError: the plan needs what the runtime lacks, named.
        PlanError: the plan is not valid, or carries no problem.
    """
    if not plan.problem:
        raise UnsupportedPlanError(
            "the plan carries no problem", key="problem", expected="a plan written by hetlab plan"
        )
    problem = problem_from_documents(plan.problem)
    _features(plan, problem)
    programs = expand(plan)
    kinds = known_kinds()
    missing = sorted({op.kind for p in programs for op in walk(p)} - kinds)
    if missing:
        raise UnsupportedPlanError(
            "the runtime has no handler for an op kind of this plan",
            key="programs",
            found=" ".join(missing),
            expected="only " + " ".join(sorted(kinds)),
        )
    for program in programs:
        check_form(program)
        for op in walk(program):
            if op.part >= 0:
                raise refused("part of a microbatch", op.name, "a plan without")
    validate(plan)
    _collectives(plan)
    return problem


def _features(plan: Plan, problem: Problem) -> None:
    math, placement = plan.mathematics, plan.placement
    if problem.model.family == "measured":
        raise _refused("model of measured times", "problem.model", "measured", "a config.json")
    shape = read_config(plan.problem["model"], problem.model.name).shape
    stages = [s.stage for s in placement.segments]
    segments = [s for s in placement.segments if s.offload or s.recompute]
    for what, key, wrong, found in (
        ("plan that changes the mathematics", "exact", not plan.exact, plan.reason),
        ("ZeRO stage", "mathematics.zero", math.zero not in (0, 1), str(math.zero)),
        ("optimizer", "mathematics.optimizer", math.optimizer not in OPTIMIZERS, math.optimizer),
        ("parameter server", "placement.extra_ranks", bool(placement.extra_ranks),
         str(placement.extra_ranks)),
        ("split of experts over replicas", "placement.ep",
         placement.ep > 1 and (shape.moe is None or shape.moe.num_experts % placement.ep > 0),
         str(placement.ep)),
        ("expert parallelism of replicas with unlike microbatches", "placement.microbatches",
         any(len(set(placement.microbatches[r : r + placement.ep])) > 1
             for r in range(0, placement.num_replicas, placement.ep)),
         str(placement.microbatches)),
        ("offload", "placement.cells", any(c.offload for c in placement.cells), "offload"),
        ("offload or recomputation of a segment", "placement.segments", bool(segments),
         ", ".join(s.name for s in segments)),
        ("stage of several segments", "placement.segments", len(set(stages)) < len(stages),
         f"{len(stages)} segments of {len(set(stages))} stages"),
        ("placement without segments", "placement.segments", not stages, "none"),
        ("boundary that skips a stage", "placement.boundaries",
         any(b.name for b in placement.boundaries), "a named boundary"),
        ("context parallelism", "placement.cells.cp", any(c.cp > 1 for c in placement.cells),
         str(max(c.cp for c in placement.cells))),
        ("dropout", "problem.job.dropout", problem.job.dropout, "true"),
        ("late amounts", "tables", bool(plan.tables), " ".join(plan.tables)),
        ("sequence parallelism of routed experts", "mathematics.sequence_parallel",
         math.sequence_parallel and shape.moe is not None, "true"),
    ):  # fmt: skip
        if wrong:
            raise _refused(what, key, found, "a plan without")
    for cell in placement.cells:
        sizes = {"num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads}
        sizes["intermediate_size"] = shape.moe.ffn if shape.moe else shape.ffn
        sizes["hidden_size"] = shape.hidden
        for name, size in sizes.items():
            if size % cell.tp:
                raise _refused(
                    f"split of {name} {size} over tp", "placement.cells.tp", str(cell.tp),
                    f"a divisor of {size}",
                )  # fmt: skip
        if math.sequence_parallel and math.sequence_length % cell.tp:
            raise _refused(
                f"split of the sequence of {math.sequence_length} over tp", "placement.cells.tp",
                str(cell.tp), "a divisor of it",
            )  # fmt: skip


def _refused(what: str, key: str, found: str, expected: str) -> UnsupportedPlanError:
    return UnsupportedPlanError(
        f"the runtime does not run this {what}", key=key, found=found, expected=expected
    )


def _collectives(plan: Plan) -> None:
    """Collectives beyond those that the built-in passes write are refused by name."""
    known = {
        ("ALL_GATHER", "f", ""), ("ALL_GATHER", "b", ""), ("ALL_REDUCE", "embed", "embed"),
        ("REDUCE_GRAD", "", ""), ("UNSHARD", "", ""), ("BARRIER", "", ""),
        ("REDUCE_GRAD", EXPERTS, "edp"), ("UNSHARD", EXPERTS, "edp"),
    }  # fmt: skip
    for program in expand(plan):
        for op in walk(program):
            if op.kind in ("ALL_GATHER", "ALL_REDUCE", "REDUCE_GRAD", "UNSHARD") and (
                (op.kind, op.label, op.group) not in known
            ):
                raise _refused("collective", "programs", op.name, "those of the built-in passes")
