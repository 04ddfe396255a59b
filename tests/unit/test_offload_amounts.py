"""What the host goes through for a rank is what it updates there, however that is shared out."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import msgspec
import pytest

from sim.cost.ledger import knobs_of, peak_memory
from sim.cost.offload import host_ledgers
from sim.engine.simulate import Run, simulate
from sim.plan.draft import CellKnobs, DataKnobs, PipelineKnobs, PlanDraft
from sim.plan.lower import lower
from sim.plan.plan import Plan
from sim.plan.uniform import layer_cuts
from sim.problem import Problem, load_problem
from strategies.compose import compose
from strategies.offload.autohete import AutoHeteKnobs
from tests.unit.test_offload import LAYERS

RATE = 50e9
"""Memory bandwidth of the host [B/s]."""


def problem_of(chips: int, batch: int, tied: bool = False) -> Problem:
    node = {
        "accelerator": "A100-SXM4-80GB", "chips": chips, "fabric": "nvlink3",
        "pcie": {"rate": "25 GB/s"}, "host_memory": "440 GB", "count": 1,
        "host": {"memory_bandwidth": "50 GB/s", "flops": "100 TFLOP/s"},
    }  # fmt: skip
    config = {
        "model_type": "gpt2", "n_embd": 1024, "n_layer": LAYERS, "n_head": 16,
        "vocab_size": 4096, "n_positions": 1024, "tie_word_embeddings": tied,
    }  # fmt: skip
    job = {
        "global_batch": batch, "sequence_length": 1024, "microbatch": 1, "gradient_dtype": "bf16",
        "limits": {"allow_inexact": True},
    }  # fmt: skip
    return load_problem({"name": "one", "sites": [{"name": "h", "nodes": [node]}]}, config, job)


def plan_of(
    problem: Problem, sizes: list[tuple[int, int]], zero: int = 0, chunks: int = 1, **knobs: Any
) -> Plan:
    """Replicas of one position, of these (tp, cp)."""
    cells, first = [], 0
    for r, (tp, cp) in enumerate(sizes):
        chips = tuple(range(first, first + tp * cp))
        cells.append(CellKnobs(stage=0, replica=r, chips=chips, tp=tp, cp=cp))
        first += tp * cp
    m = problem.job.global_batch // len(sizes)
    draft = PlanDraft(
        cells=tuple(cells),
        pipeline=PipelineKnobs(
            cuts=layer_cuts(problem.model, (LAYERS // chunks,) * chunks),
            chunks=chunks,
            schedule="interleaved" if chunks > 1 else "1f1b",
        ),
        data=DataKnobs(microbatches=(m,) * len(sizes)),
    )
    choices = [("zero", {"stage": zero, "buffers": 0}), ("offload", AutoHeteKnobs(**knobs))]
    return lower(problem, compose(problem, choices, start=draft))


def moved(run: Run) -> dict[int, dict[str, float]]:
    """Per rank in the second step: bytes of D2H and H2D, of updates and of the host's own ops."""
    graph, found = run.layout.graph, defaultdict(lambda: defaultdict(float))  # type: ignore[var-annotated]
    for k, op in enumerate(graph.ops):
        if graph.step[k] == 1:
            name = f"HOST[{op.label}]" if op.kind == "HOST" else op.kind
            found[graph.actors[graph.actor[k]].rank][name] += float(run.prices.nbytes[k])
    return found


@pytest.mark.parametrize("clipping", ["previous-norm", "speculate", "global"])
@pytest.mark.parametrize(
    ("sizes", "zero", "tied", "chunks"),
    [
        ([(1, 1)], 0, False, 1),
        ([(1, 1)], 0, True, 1),
        ([(1, 1)], 0, True, 2),
        ([(1, 2)], 0, False, 1),
        ([(1, 2), (1, 2)], 1, False, 1),
        ([(1, 2), (1, 2)], 3, True, 1),
        ([(2, 1), (1, 1)], 0, False, 1),
        ([(2, 1), (1, 1)], 1, True, 1),
    ],
)
def test_norm_and_rollback_go_through_what_the_host_updates(
    sizes: list[tuple[int, int]], zero: int, tied: bool, chunks: int, clipping: str
) -> None:
    problem = problem_of(sum(tp * cp for tp, cp in sizes), len(sizes) * 2, tied)
    knobs = {"optimizer": 3, "outer": True, "clipping": clipping, "failure_rate": 1.0}
    plan = plan_of(problem, sizes, zero, chunks, **knobs)
    run = simulate(plan, problem, steps=2, fold=False, contention=False)
    graph, job = run.layout.graph, problem.job
    owned: dict[int, float] = defaultdict(float)
    found = moved(run)
    for rank, nbytes in found.items():
        # Gradients leave once, so their bytes are those of everything the host updates.
        owned[rank] = nbytes["D2H"] / job.gradient_bytes
        assert nbytes["H2D"] == pytest.approx(owned[rank] * job.param_bytes)
    assert len(found) == problem.machine.num_chips
    (ledger,) = host_ledgers(plan, problem, knobs_of).values()
    assert ledger.terms["gradients"] == pytest.approx(sum(x["D2H"] for x in found.values()))
    seconds: dict[tuple[int, str], float] = {}
    for k, op in enumerate(graph.ops):
        if op.kind == "HOST" and graph.step[k] == 1:
            rank = graph.actors[graph.actor[k]].rank
            seconds[rank, op.label] = float(run.prices.seconds[k])
    update = job.gradient_bytes + 2 * job.optimizer_bytes + job.param_bytes
    for rank, params in owned.items():
        assert seconds[rank, "norm"] == pytest.approx(params * job.gradient_bytes / RATE)
        if clipping == "speculate":
            assert seconds[rank, "rollback"] == pytest.approx(2 * params * update / RATE)


@pytest.mark.parametrize("away", [False, True])
def test_a_parameter_tied_inside_a_position_is_held_once(away: bool) -> None:
    problem = problem_of(1, 2, tied=True)
    knobs = {"optimizer": LAYERS, "outer": True} if away else {}
    one, two = (plan_of(problem, [(1, 1)], chunks=chunks, **knobs) for chunks in (1, 2))
    if not away:
        plain = [c for c in two.lowering if c.name != "segments"]
        whole = tuple(
            msgspec.structs.replace(s, name="", recompute="") for s in two.placement.stages
        )
        placement = msgspec.structs.replace(two.placement, segments=whole)
        two = msgspec.structs.replace(two, lowering=tuple(plain), placement=placement)
    ledgers = [next(iter(peak_memory(plan, problem).values())).terms for plan in (one, two)]
    for term in ("parameters", "gradients", "optimizer"):
        assert ledgers[0][term] == pytest.approx(ledgers[1][term])
