"""Sites that step by themselves with experts spread inside them, and with hosts on one of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from sim.cost.ledger import knobs_of, peak_memory
from sim.cost.offload import host_ledgers
from sim.engine.simulate import Run, simulate
from sim.model.amounts import rank_params
from sim.plan.draft import CellKnobs, DataKnobs, ExpertKnobs, PipelineKnobs, PlanDraft
from sim.plan.io import plan_from_json, plan_to_json
from sim.plan.lower import lower
from sim.plan.placement import derive_groups
from sim.plan.plan import Plan
from sim.plan.uniform import layer_cuts
from sim.plan.validate import validate
from sim.problem import Problem, load_problem
from strategies.compose import compose
from strategies.expert.routing_synthetic import Popularity

LARGE, SMALL = "H100-SXM5-80GB", "A100-SXM4-40GB"
MODEL = {
    "model_type": "mixtral", "hidden_size": 1024, "intermediate_size": 3584,
    "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 8,
    "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 4096,
    "max_position_embeddings": 1024,
}  # fmt: skip
LAYERS = 4
LEAVE = {("ENCODE", "outer"), ("HOST", "way")}


def two_sites() -> Problem:
    """Four H100 on one site, two nodes of two A100 with hosts on another."""
    node = {"profile": "a100_40gb_offload", "nics": {"profile": "ib_hdr_200g", "count": 1}}
    cluster = {
        "name": "pair",
        "sites": [
            {"name": "a", "nodes": [{"profile": "h100_ndr", "chips": 4, "count": 1}]},
            {"name": "b", "nodes": [{**node, "chips": 2, "count": 2}]},
        ],
        "links": [{"between": ["a", "b"], "profile": "wan_oregon_california"}],
    }
    job = {"global_batch": 32, "sequence_length": 512, "limits": {"allow_inexact": True}}
    return load_problem(cluster, MODEL, job)


def planned(
    given: Problem,
    *,
    ep: int = 2,
    shares: tuple[int, int] = (6, 2),
    pp: int = 1,
    inner: int = 2,
    hosts: dict[str, Any] | None = None,
    **local: Any,
) -> Plan:
    dp = 4 // pp
    cells = tuple(
        CellKnobs(stage=s, replica=site * dp + r, chips=(4 * site + s * dp + r,))
        for s in range(pp)
        for site in range(2)
        for r in range(dp)
    )
    draft = PlanDraft(
        cells=cells,
        pipeline=PipelineKnobs(cuts=layer_cuts(given.model, (LAYERS // pp,) * pp)),
        data=DataKnobs(microbatches=(shares[0] * pp,) * dp + (shares[1] * pp,) * dp),
        expert=ExpertKnobs(ep=ep),
    )
    chosen: list[tuple[str, Any]] = [("local_sgd", {"inner": inner} | local)]
    if hosts is not None:
        chosen.append(("offload", {"accelerators": (SMALL,)} | hosts))
    plan = lower(given, compose(given, chosen, start=draft))
    validate(plan, given)
    return plan


def sums(run: Run, kind: str, label: str) -> Counter[tuple[int, ...]]:
    """How often each group of ranks ran a collective."""
    graph = run.layout.graph
    found: Counter[tuple[int, ...]] = Counter()
    for node, op in enumerate(graph.ops):
        if op.kind == kind and op.label.endswith(label):
            found[graph.wires[graph.wire[node]].group] += 1
    return found


def test_experts_sum_inside_a_worker_and_meet_between_them() -> None:
    given = two_sites()
    plan = planned(given, inner=3)
    roles = Counter(g.role for g in derive_groups(plan.placement))
    assert roles["local_edp"] == 4 and roles["edp"] == 2 and roles["ep"] == 4
    run = simulate(plan, given, fold=False)
    assert sums(run, "REDUCE_GRAD", "experts") == dict.fromkeys([(0, 2), (1, 3), (4, 6), (5, 7)], 3)
    assert sums(run, "ALL_REDUCE", "experts") == {(0, 2, 4, 6): 1, (1, 3, 5, 7): 1}
    whole = plan.amounts["exchange0"].nbytes + 2 * plan.amounts["experts0"].nbytes
    assert whole == pytest.approx(4 * sum(rank_params(given.model.blocks)))


def test_one_site_keeps_all_on_its_chips() -> None:
    given = two_sites()
    hosts = {"optimizer": LAYERS, "outer": True, "checkpointed": LAYERS}
    plan, plain = planned(given, hosts=hosts), planned(given)
    run = simulate(plan, given, steps=2, fold=False)
    graph = run.layout.graph
    away = {graph.actors[a].rank for a, s in graph.stream_names if s in ("host", "d2h", "h2d")}
    assert away == {4, 5, 6, 7}
    memory, before = peak_memory(plan, given), peak_memory(plain, given)
    terms = memory[0, 0].terms
    assert terms["optimizer"] == before[0, 0].terms["optimizer"] > 0
    assert memory[0, 4].terms["optimizer"] == 0
    assert terms["activations"] > memory[0, 4].terms["activations"]
    # Each node's two ranks hold states, masters, and what local steps keep.
    params = sum(rank_params(given.model.blocks, 1, 2))
    for node in host_ledgers(plan, given, knobs_of).values():
        assert node.terms["optimizer"] == pytest.approx(2 * params * (12 + 8))
    assert set(host_ledgers(plan, given, knobs_of)) == {1, 2}


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("local", [{}, {"overlap": True}, {"overlap": True, "fragments": 2}])
def test_rounds_with_hosts_run_in_order(local: dict[str, Any], pp: int) -> None:
    """No update overtakes the exchange before it, and no forward an update of its round."""
    given = two_sites()
    hosts = {"optimizer": LAYERS - 1, "outer": True}
    plan = planned(given, inner=4, hosts=hosts, pp=pp, **local)
    run = simulate(plan, given, steps=4, fold=False)
    graph, out = run.layout.graph, run.outcome
    late = int(bool(local.get("overlap")))
    for actor in {int(graph.actor[k]) for k in range(graph.num_nodes)}:
        mine = [k for k in range(graph.num_nodes) if int(graph.actor[k]) == actor]
        for step in range(1, 4):
            forwards = [
                out.start[k] for k in mine if graph.ops[k].kind == "F" and graph.step[k] == step
            ]
            leave = [
                out.end[k]
                for k in mine
                if (graph.ops[k].kind, graph.ops[k].label) in LEAVE and graph.step[k] == step - 1
            ]
            arrive = [
                out.end[k]
                for k in mine
                if graph.ops[k].label == "outer"
                and graph.ops[k].kind in ("OPT", "HOST", "H2D")
                and graph.step[k] == step - 1 - late
            ]
            assert min(forwards) >= max([*leave, *arrive]) - 1e-12


def test_a_round_is_its_steps_and_the_exchange() -> None:
    """Steps of the slowest site, then the exchange: with hosts, between what they must do."""
    given = two_sites()
    for hosts in (None, {"optimizer": LAYERS, "outer": True}):
        times = [
            simulate(planned(given, inner=h, hosts=hosts), given).makespan for h in (1, 2, 5, 6)
        ]
        step = times[3] - times[2]
        assert times[1] - times[0] == pytest.approx(step, rel=0.05)
        alone = [simulate(planned(given, inner=1, hosts=hosts), given).makespan]
        assert alone[0] > step


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ({"parameters": 2}, "updated there where workers step by themselves"),
        ({"optimizer": 1, "accelerators": ("T4",)}, "no cell is on these accelerators"),
    ],
)
def test_what_is_refused(hosts: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        planned(two_sites(), hosts=hosts)


def test_a_lone_cell_that_keeps_all_folds_and_prints() -> None:
    """Folding does not join cells that differ in what they keep."""
    given = two_sites()
    plan = planned(given, hosts={"optimizer": LAYERS})
    folded, apart = (simulate(plan, given, steps=3, fold=f) for f in (True, False))
    assert folded.makespan == pytest.approx(apart.makespan, rel=1e-9)
    assert len(folded.layout.graph.actors) < len(apart.layout.graph.actors)
    cells = {c.accelerator: c.offload for c in plan.placement.cells}
    assert cells == {LARGE: "none", SMALL: ""}


def test_all_four_strategies_in_one_plan() -> None:
    """Lent experts, unlike shares, one site's hosts, steps of one's own: valid, folded alike."""
    given = two_sites()
    popularity = {"sigma": 0.6, "step": 0.1, "concentration": 100.0}
    cells = tuple(CellKnobs(stage=0, replica=r, chips=(r,)) for r in range(8))
    draft = PlanDraft(
        cells=cells,
        pipeline=PipelineKnobs(cuts=(0, len(given.model.blocks))),
        data=DataKnobs(microbatches=(6,) * 4 + (2,) * 4),
        expert=ExpertKnobs(ep=4),
    )
    chosen: list[tuple[str, Any]] = [
        ("local_sgd", {"inner": 4, "overlap": True, "bits": 8, "fragments": 2}),
        ("offload", {"optimizer": LAYERS - 1, "accelerators": (SMALL,)}),
        ("balanced", {"balancer": "spread", "slots": 1, "popularity": Popularity(**popularity)}),
    ]
    # Axes order them, however they are listed.
    full = compose(given, chosen, start=draft)
    assert full == compose(given, chosen[::-1], start=draft)
    plan = lower(given, full)
    validate(plan, given)
    assert [c.name for c in plan.lowering][-3:] == ["segments", "lend", "local_steps"]
    assert plan_from_json(plan_to_json(plan)) == plan and not plan.exact
    folded, apart = (simulate(plan, given, steps=3, fold=f) for f in (True, False))
    assert folded.makespan == pytest.approx(apart.makespan, rel=1e-9)
    kinds = {op.kind for op in apart.layout.graph.ops}
    assert {"ALL_TO_ALL", "MOVE_EXPERT", "REDUCE_EXPERT", "D2H", "H2D", "ENCODE"} <= kinds
