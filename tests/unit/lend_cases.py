"""Plans whose layers of experts are written out, for tests."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from sim.plan.draft import PlanDraft
from sim.plan.lower import lower
from sim.plan.placement import Cell, Placement, Segment
from sim.plan.plan import Call, Plan, Table
from sim.plan.uniform import uniform
from sim.problem import Problem, load_problem

MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


@cache
def small(dtype: str = "bf16") -> Problem:
    """Four layers of eight experts on nodes of eight chips."""
    job = {"global_batch": 16, "sequence_length": 256, "dtype": dtype}
    return load_problem("a100x64", MIXTRAL, job)


def both(
    chips: int, args: dict[str, Any] | None = None, **sizes: Any
) -> tuple[Plan, Plan, PlanDraft]:
    """A mesh with its layers boxed, the same written out, and the draft of that one."""
    problem = small()
    draft = uniform(problem.model, problem.job.global_batch, range(chips), **sizes)
    boxed = lower(problem, draft)
    out = msgspec.structs.replace(draft, expert=msgspec.structs.replace(draft.expert, inlined=True))
    segments = lower(problem, out).placement.segments
    blocks = problem.model.blocks
    experts = {
        f"{s.stage}[{s.name}]": s.name
        for s in segments
        if any(b.num_experts for b in blocks[slice(*s.blocks)])
    }
    call = Call("lend", 1, {"experts": experts, **(args or {})})
    passes = (call,) if draft.data.zero < 2 else (Call("segments"), call)
    out = msgspec.structs.replace(out, passes=passes)
    return boxed, lower(problem, out), out


def pro_prophet() -> tuple[Plan, dict[str, float]]:
    """The second of the eight miniature plans as the pass writes it, and its stated seconds.

    Between the experts of b0 and b1 stands the dense part of b1, behind those of b1 the head.
    """
    cells = tuple(Cell(stage=0, replica=r, ranks=(r,)) for r in (0, 1))
    segments = tuple(Segment(stage=0, cell=0, name=n) for n in ("b0", "b1", "head"))
    even, first, then = [4, 4], [7, 1], [4, 4]
    values: dict[str, list[Any]] = {
        "b0.load": [even], "b0.load_b": [even], "b0.dispatch": [2.0], "b0.combine": [2.0],
        "b0.move": [0.0], "b0.reduce": [0.0],
        "b1.load": [first, then], "b1.load_b": [first, then],
        "b1.dispatch": [3.0, 0.0], "b1.combine": [3.0, 0.0],
    }  # fmt: skip
    for what in ("move", "reduce"):
        values |= {f"b1.{what}.{part}": [0.0, 1.5] for part in (0, 1)}
    args = {
        "experts": {"0[b0]": "b0", "0[b1]": "b1"},
        "table": "lent",
        "slots": 1,
        "search": "search",
    }
    plan = Plan(
        name="pro-prophet",
        placement=Placement(cells=cells, segments=segments, microbatches=(1, 1), ep=2),
        lowering=(Call("schedule"), Call("transfers"), Call("gradients"), Call("lend", 1, args)),
        tables={"lent": Table(values=values), "search": Table(values={"searched": [1.0]})},
    )
    seconds = {
        "F[b0/experts]": 0.25, "F[b1/experts]": 0.25, "B[b0/experts]": 0.5, "B[b1/experts]": 0.5,
        "F[b0]": 0.0, "F[b1]": 1.0, "F[head]": 1.0, "B[head]": 2.0, "B[b1]": 2.0, "B[b0]": 0.0,
        "ALL_TO_ALL": 0.25, "MOVE_EXPERT": 0.5, "REDUCE_EXPERT": 0.5, "HOST": 0.25, "OPT": 0.5,
        "REDUCE_GRAD": 0.0,
    }  # fmt: skip
    return plan, seconds
