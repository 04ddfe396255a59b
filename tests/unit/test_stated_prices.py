from __future__ import annotations

import numpy as np
import pytest

from sim.cost.stated import StatedFlow, late_units, stated_prices
from sim.engine.execute import execute
from sim.errors import InputError
from sim.plan.graph import OpGraph, build_graph
from sim.plan.placement import Cell, Placement
from sim.plan.program import parse_program
from sim.plan.wiring import wire


def two_ranks(text: str, other: str | None = None, ep: int = 1) -> OpGraph:
    cells = tuple(Cell(stage=0, replica=r, ranks=(r,)) for r in range(2))
    programs = (
        [parse_program(text, (0,)), parse_program(other, (1,))]
        if other
        else [parse_program(text, (0, 1))]
    )
    return build_graph(programs, wire(Placement(cells=cells, ep=ep)))


def test_the_most_specific_text_wins() -> None:
    graph = two_ranks("0F0 0F1 0F0[x] 0F1[x]")
    stated = {"F": 1.0, "0F": 2.0, "F[x]": 3.0, "0F1[x]": 4.0, "rank 1 F": 5.0}
    prices = stated_prices(graph, stated)
    by_rank = {r: [] for r in (0, 1)}
    for node in range(graph.num_nodes):
        by_rank[graph.actors[graph.actor[node]].rank].append(prices.seconds[node])
    assert by_rank[0] == [2.0, 2.0, 3.0, 4.0]
    assert by_rank[1] == [5.0] * 4


def test_an_op_without_a_time_is_refused_by_name() -> None:
    graph = two_ranks("F0 B0 BARRIER")
    with pytest.raises(InputError, match="no time is stated for B0 of rank 0"):
        stated_prices(graph, {"F": 1.0})
    assert stated_prices(graph, {"F": 1.0}, default=0.5).seconds.max() == 1.0


def test_flows_on_a_shared_link_contend() -> None:
    graph = two_ranks("F0 SEND_F0>1 RECV_F0>1", "F0 SEND_F0>0 RECV_F0>0")
    flow = StatedFlow(links=("wire",), nbytes=10.0, fixed_s=0.5)
    prices = stated_prices(graph, {"F": 1.0, "SEND_F": flow}, {"wire": 10.0})
    assert execute(graph, prices).makespan == pytest.approx(1.0 + 0.5 + 2.0)
    with pytest.raises(InputError, match="unknown link"):
        stated_prices(graph, {"F": 1.0, "SEND_F": flow}, {"other": 1.0})


def test_late_amounts_reduce_to_the_units_that_set_the_time() -> None:
    graph = two_ranks("F0 ALL_TO_ALL0 <- F0", ep=2)
    compute = [k for k, op in enumerate(graph.ops) if op.kind == "F"]
    moved = next(k for k, op in enumerate(graph.ops) if op.kind == "ALL_TO_ALL")
    matrix = np.array([[4.0, 0.0], [3.0, 1.0]])
    assert late_units(graph, moved, matrix) == 3.0
    assert [late_units(graph, k, matrix) for k in compute] == [7.0, 1.0]
    assert late_units(graph, moved, [1.0, 2.0]) == 2.0
    assert [late_units(graph, k, [7.0, 1.0]) for k in compute] == [7.0, 1.0]
    assert late_units(graph, compute[0], 3.0) == 3.0
    with pytest.raises(InputError, match="fits none of its rank's groups"):
        late_units(graph, compute[0], [1.0, 2.0, 3.0])
    prices = stated_prices(graph, {"F": 0.25, "ALL_TO_ALL": 0.25}, late=lambda _: matrix)
    assert execute(graph, prices).makespan == 0.25 * 7 + 0.25 * 3


def test_a_vector_is_over_the_group_that_the_op_names() -> None:
    """Ranks 0 and 1 are a tensor-parallel group, 0 and 2 hold experts together."""
    cells = tuple(Cell(stage=0, replica=r, ranks=(2 * r, 2 * r + 1), tp=2) for r in range(2))
    text = "ALL_REDUCE0 F0{0} <- ALL_REDUCE0 ; ALL_TO_ALL0 <- F0"
    found = {}
    for role in ("ep", "tp"):
        program = parse_program(text.replace("{0}", f":{role}"), tuple(range(4)))
        graph = build_graph([program], wire(Placement(cells=cells, ep=2)))
        nodes = [k for k, op in enumerate(graph.ops) if op.kind == "F"]
        found[role] = [late_units(graph, k, [7.0, 1.0]) for k in nodes]
    assert found == {"ep": [7.0, 7.0, 1.0, 1.0], "tp": [7.0, 1.0, 7.0, 1.0]}
    with pytest.raises(InputError, match="members x members"):
        late_units(graph, nodes[0], [[1.0, 2.0]])
