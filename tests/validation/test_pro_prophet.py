"""Pro-Prophet's printed cells: a fast part of the table, and what the machines and models are."""

from __future__ import annotations

import pytest

from strategies.expert.routing import statistics
from strategies.expert.routing_calibrate import LAER_E8K2, calibrate
from tests.validation.pro_prophet_cases import (
    BALANCING_SHARE,
    CLUSTERS,
    HPNV4,
    HPWNV4,
    LPWNV2,
    MODELS,
    PUBLISHED,
    machine_of,
    model_of,
)
from tests.validation.pro_prophet_cells import Cell, cells, inside
from tests.validation.pro_prophet_runs import costs_of, fitted, routing_of, run
from tests.validation.pro_prophet_tables import (
    cell_lines,
    hot_lines,
    period_lines,
    setting_lines,
    share_lines,
    step_lines,
    strict_line,
    summary_lines,
)
from tests.validation.pro_prophet_trace import fullness


@pytest.fixture(scope="module")
def exponents() -> dict[tuple[str, int], float]:
    return {(m, k): fitted(m, k) for m, k in (("DS", 1),)}


@pytest.fixture(scope="module")
def found(exponents: dict[tuple[str, int], float]) -> list[Cell]:
    return cells(exponents, (HPNV4, LPWNV2))


def test_sizes_are_those_of_the_paper() -> None:
    sizes = {"S": 4.19e6, "M": 16.8e6, "L": 67.1e6, "DS": 4.19e6, "DM": 16.8e6}
    for name, nbytes in sizes.items():
        costs = costs_of(HPNV4, name, 1, 0.0)
        assert costs.layers[0].param_bytes == pytest.approx(nbytes, rel=2e-3)
        assert len(costs.layers) == MODELS[name][0]
        assert {b.num_experts for b in model_of(name, 16, 1).blocks} == {0, 16}
    assert [c.devices for c in CLUSTERS] == [machine_of(c).num_chips for c in CLUSTERS]
    assert routing_of(LPWNV2, "S", 2, 1.0).counts[0, 0].sum() == 2 * 4096
    assert len(PUBLISHED) == 18


def test_bridges_join_pairs_and_servers_share_a_card() -> None:
    links = costs_of(HPNV4, "S", 1, 0.0).layers[0].links
    pair = {(i, j): links.classes[links.pair[i, j]] for i in range(4) for j in range(16) if i != j}
    assert pair[0, 1].rate == pytest.approx(49.769e9)
    assert pair[0, 2].rate == pair[0, 4].rate == pytest.approx(7.862e9)
    crossing = [set(links.links[i, j].tolist()) - {-1} for i, j in ((0, 4), (3, 8), (0, 2))]
    shared = crossing[0] & crossing[1]
    assert [links.rates[x] for x in shared] == [pytest.approx(12.5e9)]
    assert not crossing[2] & shared
    for cluster, port in ((HPWNV4, 7.862e9), (LPWNV2, 10.756e9)):
        plain = costs_of(cluster, "S", 1, 0.0).layers[0].links
        assert [kind.rate for kind in plain.classes] == [pytest.approx(port)] * 2
        near, far = (set(plain.links[0, j].tolist()) - {-1} for j in (1, 4))
        assert (len(near), len(far)) == (2, 4)
        assert sorted(plain.rates[x] for x in far) == pytest.approx([port] * 2 + [12.5e9] * 2)


def test_only_fastermoes_column_is_fitted(found: list[Cell]) -> None:
    for cell in found:
        if cell.cluster is HPNV4:
            assert cell.ratios["FasterMoE"] == pytest.approx(1.0, abs=0.06)
    assert inside(found, ("FasterMoE", "Pro-Prophet", "PP/FM")) == (6, 6)
    narrow = [c.ratios["Pro-Prophet"] for c in found if c.cluster is HPNV4]
    assert narrow == pytest.approx([1.0], abs=0.12)


def test_ours_is_never_slower(found: list[Cell]) -> None:
    for cell in found:
        assert cell.spread >= 1.03 * cell.pro_prophet
        assert cell.pro_prophet > cell.fastermoe


def test_routing_is_as_uneven_as_published(exponents: dict[tuple[str, int], float]) -> None:
    for (name, k), zipf in exponents.items():
        s = statistics(routing_of(HPNV4, name, k, zipf), 16)
        assert s.top3 > 0.5 and s.bottom3 < 0.05


def test_older_plans_are_less_even(exponents: dict[tuple[str, int], float]) -> None:
    lines = period_lines("DS", 1, exponents["DS", 1], (1, 5))
    assert [line.split()[0] for line in lines[1:]] == ["pro-prophet", "spread"]
    new, old = (run(HPNV4, "DS", 1, exponents["DS", 1], "spread", p) for p in (1, 5))
    assert old.load.mean > new.load.mean and old.seconds.mean() > new.seconds.mean()


def test_transfers_of_the_baseline_weigh_what_was_published(
    exponents: dict[tuple[str, int], float],
) -> None:
    x = run(HPNV4, "DS", 1, exponents["DS", 1], "fastermoe")
    search, place, reduce = BALANCING_SHARE["DS"]
    assert float((x.transfer_s / x.seconds).mean()) == pytest.approx(place + reduce, rel=0.3)
    assert float((x.plan_s / x.seconds).mean()) < search
    assert (x.exposed_s == x.transfer_s).all()


def test_lending_evens_the_public_traces_routing() -> None:
    calibration = calibrate(LAER_E8K2)
    plain, ours = (
        fullness(calibration, name, budget, layers=2, steps=6)
        for name, budget in (("none", 0), ("spread", 2))
    )
    assert plain.lent == plain.static and plain.static.mean == pytest.approx(1.66, rel=0.1)
    assert ours.group.mean <= 1.10
    assert ours.lent.mean <= 1.10
    assert 0 < ours.copies <= 2


def test_tables_say_what_was_found(
    found: list[Cell], exponents: dict[tuple[str, int], float]
) -> None:
    text = "\n".join(summary_lines(found))
    assert "4 of 4" in text and "slower than Pro-Prophet in 0 of 2" in text
    assert len(cell_lines(found)) == 1 + len(found)
    assert "5.00!" in cell_lines([Cell(**{**fields(found[0]), "fastermoe": 6.7})])[1]
    bad = Cell(**{**fields(found[0]), "pro_prophet": 0.5})
    assert "outside: 4 HPNV k=1 DS Pro-Prophet: 0.29" in "\n".join(summary_lines([bad]))
    assert "we do not know why" in "\n".join(summary_lines([bad]))
    assert "2 of 2 printed" in strict_line(found) and "slower in 0 of 2" in strict_line(found)
    assert len(hot_lines(exponents)) == 2
    assert len(setting_lines(exponents)) == 4 and len(share_lines(exponents)) == 2
    assert len(step_lines(exponents, HPNV4)) == 7


def fields(cell: Cell) -> dict[str, object]:
    return {name: getattr(cell, name) for name in cell.__struct_fields__}
