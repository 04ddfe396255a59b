"""Compute and communication that slow each other: who shares a link with whom stays the same."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.cost.prices import Prices
from sim.cost.stated import StatedFlow, stated_prices
from sim.engine.execute import Execution
from sim.engine.overlap import Overlap
from sim.engine.simulate import Layout, Run, lay_out, run_layout, simulate
from sim.plan.draft import DataKnobs, PlanDraft
from sim.plan.lower import lower
from sim.plan.placement import Boundary, Cell, Placement, Segment
from sim.plan.plan import Amount, Plan, ProgramText
from sim.plan.uniform import uniform
from sim.problem import Problem, load_problem
from strategies.compose import compose
from tests.property.cost_cases import HOP_S, NIC, machine, problem, small

SHAPE: dict[str, Any] = {
    "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 8, "vocab_size": 4096, "max_position_embeddings": 512,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "dense": {
        "model_type": "llama", "intermediate_size": 1024, "tie_word_embeddings": False, **SHAPE,
    },
    "tied": {
        "model_type": "llama", "intermediate_size": 1024, "tie_word_embeddings": True, **SHAPE,
    },
    "moe": {
        "model_type": "mixtral", "intermediate_size": 512, "num_local_experts": 4,
        "num_experts_per_tok": 2, **SHAPE,
    },
}  # fmt: skip
MESHES: tuple[dict[str, int], ...] = (
    {"pp": 2}, {"pp": 4}, {"pp": 2, "tp": 2}, {"tp": 2}, {"pp": 2, "cp": 2}, {"cp": 2}, {},
    {"ep": 2}, {"ep": 4}, {"pp": 2, "ep": 2}, {"tp": 2, "ep": 2},
)  # fmt: skip
APART = (range(8), (0, 4, 1, 5, 2, 6, 3, 7), (0, 1, 4, 5, 2, 3, 6, 7))
"""Chips of two nodes one after the other, in turns, and in turns by pairs."""


@cache
def slow(model: str, nics: int, second: str, compute: float, comm: float, batch: int) -> Problem:
    """Two nodes of four chips that share ``nics`` NICs, with these slow-downs on every chip."""
    nodes = [
        {
            "accelerator": name, "chips": 4, "fabric": "nvlink3",
            "nics": {"profile": "ib_hdr_200g", "count": nics},
        }
        for name in ("A100-SXM4-80GB", second)
    ]  # fmt: skip
    job = {"global_batch": batch, "sequence_length": 512, "dtype": "bf16"}
    cluster = {"name": "two", "sites": [{"name": "here", "nodes": nodes}]}
    found = load_problem(cluster, MODELS[model], job)
    chips = {
        name: msgspec.structs.replace(chip, compute_slowdown=compute, comm_slowdown=comm)
        for name, chip in found.machine.accelerators.items()
    }
    machine = msgspec.structs.replace(found.machine, accelerators=chips)
    return msgspec.structs.replace(found, machine=machine)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Problem, Plan]:
    """Every axis over two nodes, even or uneven replicas, ZeRO 0 to 3."""
    mesh = draw(st.sampled_from(MESHES))
    inner = mesh.get("tp", 1) * mesh.get("cp", 1) * mesh.get("pp", 1)
    second = draw(st.sampled_from(["A100-SXM4-80GB", "A100-SXM4-80GB", "H100-SXM5-80GB"]))
    order = draw(st.sampled_from(APART)) if second.startswith("A100") else range(8)
    chips = order[: draw(st.sampled_from([4, 8, 8]))]
    replicas = len(chips) // inner
    unit = 2 if mesh == {"pp": 2} and draw(st.booleans()) else 1
    counts = [draw(st.integers(1, 3)) * unit] * replicas
    if replicas > 1 and unit == 1 and draw(st.integers(0, 3)) == 0:
        counts[0] += 1
    if replicas % mesh.get("ep", 1) or (mesh.get("ep", 1) > 1 and len(set(counts)) > 1):
        counts, mesh = [2] * replicas, {k: n for k, n in mesh.items() if k != "ep"}
    factors = draw(st.sampled_from([(1.1256, 1.1256), (1.3, 2.5), (1.0, 4.0), (2.0, 1.0)]))
    model = "moe" if "ep" in mesh else draw(st.sampled_from(["dense", "tied"]))
    problem = slow(
        model,
        draw(st.sampled_from([1, 1, 2])),
        second,
        *factors,
        sum(counts),
    )
    draft: PlanDraft = uniform(
        problem.model, replicas, tuple(chips), **mesh,
        schedule=draw(st.sampled_from(["1f1b", "gpipe", "zb-h1"])) if unit == 1 else "1f1b",
        chunks=unit, buffers=draw(st.integers(1, 3)),
    )  # fmt: skip
    draft = msgspec.structs.replace(
        draft, data=DataKnobs(microbatches=tuple(counts)), barrier=draw(st.booleans())
    )
    parted = "ep" in mesh or len(set(counts)) > 1 or (mesh.get("pp", 1) > 1 and model == "tied")
    zero = draw(st.integers(0, 1 if parted else 3)) if replicas > 1 else 0
    if zero:
        draft = compose(problem, [("zero", {"stage": zero})], start=draft)
    return problem, lower(problem, draft)


def both(case: tuple[Problem, Plan], steps: int, contention: bool = True) -> tuple[Run, Run]:
    problem, plan = case
    folded, single = (
        simulate(plan, problem, steps=steps, fold=fold, contention=contention)
        for fold in (True, False)
    )
    return folded, single


@given(cases(), st.integers(1, 2))
@settings(max_examples=60)
def test_folded_equals_unfolded(case: tuple[Problem, Plan], steps: int) -> None:
    folded, single = both(case, steps)
    assert folded.makespan == pytest.approx(single.makespan, rel=1e-9)


# -- by hand ------------------------------------------------------------------------------------


def exchange(comm: float, nics: int) -> tuple[Run, Run]:
    """Two groups of four over two nodes exchange 16 MB per pair while each chip computes."""
    m = machine(2, 4, nics)
    chip = msgspec.structs.replace(m.accelerators["chip"], comm_slowdown=comm)
    p = problem(msgspec.structs.replace(m, accelerators={"chip": chip}), small())
    ranks = range(8)
    plan = Plan(
        barrier=False,
        placement=Placement(
            cells=tuple(Cell(stage=0, replica=r, ranks=(r,)) for r in ranks),
            segments=(Segment(stage=0, cell=0, blocks=(0, len(p.model.blocks))),),
            microbatches=(1,) * 8,
            ep=4,
            chips=(0, 1, 4, 5, 2, 3, 6, 7),
        ),
        amounts={"x": Amount(nbytes=64e6)},
        programs=(
            ProgramText(tuple(ranks), "ALL_TO_ALL{amount=x} <- none ; F ; B <- F ; OPT <- B"),
        ),
    )
    return both((p, plan), 1)


@pytest.mark.parametrize("comm", [1.0, 1.3, 2.5])
@pytest.mark.parametrize("nics", [1, 2, 4])
def test_an_exchange_is_slowed_where_its_chips_set_the_pace(nics: int, comm: float) -> None:
    # A chip sends 2 x 16 MB to the other node; a NIC carries that of 4 / nics chips, of which
    # two are of one group when it has two or more. Alone, a group is as fast as its busiest NIC.
    body = 32e6 * 4 / nics / NIC
    alone = 32e6 * min(2, 4 / nics) / NIC
    for run in exchange(comm, nics):
        graph, end = run.layout.graph, run.outcome.end
        work = max(end[k] for k, op in enumerate(graph.ops) if op.kind != "ALL_TO_ALL")
        first = comm * HOP_S  # the latency, slowed as a whole
        done = (work - first) / max(body, alone * comm)
        expected = work + (1 - done) * body
        found = {end[k] for k, op in enumerate(graph.ops) if op.kind == "ALL_TO_ALL"}
        assert first < work < expected
        assert sorted(found) == pytest.approx([expected] * len(found), rel=1e-12)
        assert bool(run.prices.flows) is (nics == 1 and len(graph.actors) == 8)


def test_a_slowed_flow_has_the_rate_that_its_message_reaches_alone() -> None:
    # Two forwards of 1 s on stage 0; the send of the first starts with the second. Alone its bytes
    # take 1 s (other flows of it use the link), so under the slow-down they move at a quarter.
    placement = Placement(
        cells=(Cell(stage=0, replica=0, ranks=(0,)), Cell(stage=1, replica=0, ranks=(1,))),
        segments=(Segment(stage=0, cell=0), Segment(stage=1, cell=1)),
        boundaries=(Boundary(src=0, dst=1),),
        microbatches=(2,),
    )
    texts = ("0F0 0SEND_F0 0F1 OPT <- 0F1", "1RECV_F0 1F0 OPT")
    plan = Plan(
        barrier=False,
        placement=placement,
        programs=tuple(ProgramText((r,), text) for r, text in enumerate(texts)),
    )
    stated: dict[str, float | StatedFlow] = {
        "F": 1.0, "OPT": 0.0, "SEND_F": StatedFlow(links=("wire",), nbytes=0.5),
    }  # fmt: skip

    def end(*alone: tuple[float, float]) -> float:
        def price(lay: Layout) -> Prices:
            prices = stated_prices(lay.graph, stated, {"wire": 1.0})
            return msgspec.structs.replace(
                prices, alone=dict.fromkeys(prices.flows, alone[0]) if alone else {}
            )

        def prepare(run: Execution) -> None:
            Overlap(run, {0: (1.0, 2.0)})

        found = run_layout(lay_out(plan), price, prepare=prepare)
        (sent,) = found.prices.flows
        return float(found.outcome.end[sent])

    assert end() == pytest.approx(2.0)  # 0.5 B at half of the wire's 1 B/s
    assert end((0.0, 1.0)) == pytest.approx(2.25)  # 0.25 B by the end of 0F1, then at 1 B/s
