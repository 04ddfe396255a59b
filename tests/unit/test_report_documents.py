"""The JSON documents and the tables that show them."""

from __future__ import annotations

from io import StringIO

import msgspec
import pytest
from rich.console import Console

from sim.cost.ledger import Ledger
from sim.cost.prices import Prices
from sim.cost.stated import StatedFlow, stated_prices
from sim.engine.simulate import Run, lay_out, run_layout
from sim.hardware.machine import Accelerator, Link, Machine, Node
from sim.model.graph import Block, Gemm, Model
from sim.plan.passes import standard_calls
from sim.plan.placement import Boundary, Cell, Placement, Segment
from sim.plan.plan import Mathematics, Plan
from sim.problem import Problem
from sim.report.document import SearchFacts, plan_document, stages_of
from sim.report.links import link_use
from sim.report.report import Report, report_of
from sim.report.table import print_plan, print_simulation

METRICS = {
    "step_time_s", "tokens_per_s", "tgs", "mfu", "hfu", "bubble_fraction", "exposed_comm_s",
    "exposed_comm_max_s", "exposed_comm_max_rank",
    "cost_per_mtoken",
}  # fmt: skip


def model(layers: int = 5) -> Model:
    """Half-layer blocks between an embedding and a head."""
    blocks = [Block(name="embed", kind="embedding", layer=-1)]
    for i in range(layers):
        blocks += [
            Block(name=f"{i}.{k}", kind="mlp", layer=i, gemms=(Gemm(n=100, k=100),)) for k in "ab"
        ]
    blocks.append(Block(name="head", kind="head", layer=layers))
    return Model(name="tiny", family="x", blocks=tuple(blocks), edges=(), num_layers=layers)


def machine() -> Machine:
    kinds = [
        Accelerator(
            name=name, memory_bytes=memory, memory_bytes_per_s=1e12,
            peak_flops_per_s={"fp16": peak}, price_per_s=0.0005,
        )
        for name, memory, peak in (("V100", 16e9, 6e5), ("T4", 16e9, 4e5))
    ]  # fmt: skip
    nodes = tuple(
        Node(
            index=i, profile="n", site="s", island="i", accelerator=name, chips=chips,
            fabric_rate=1e11,
        )
        for i, (name, chips) in enumerate((("V100", (0, 4)), ("T4", (4, 6))))
    )  # fmt: skip
    return Machine(
        name="mix", accelerators={k.name: k for k in kinds}, nodes=nodes,
        links=(Link(name="wan", rate=10.0, price_per_byte=0.01),),
    )  # fmt: skip


def plan() -> Plan:
    """Two stages, two replicas: V100 tp 2 (7 half layers and the embedding), then one T4."""
    cells = (
        Cell(stage=0, replica=0, ranks=(0, 1), tp=2, accelerator="V100", recompute="full"),
        Cell(stage=0, replica=1, ranks=(2, 3), tp=2, accelerator="V100", recompute="full"),
        Cell(stage=1, replica=0, ranks=(4,), accelerator="T4"),
        Cell(stage=1, replica=1, ranks=(5,), accelerator="T4"),
    )
    return Plan(
        name="mixed",
        placement=Placement(
            cells=cells,
            segments=(
                Segment(stage=0, cell=0, blocks=(0, 8)),
                Segment(stage=1, cell=1, blocks=(8, 12)),
            ),
            boundaries=(Boundary(src=0, dst=1),),
            microbatches=(4, 4),
        ),
        mathematics=Mathematics(global_batch=8, sequence_length=10, dtype="fp16"),
        lowering=standard_calls("1f1b", 1, False, False, (), ()),
        problem_hash="0123456789abcdef",
        assumptions=("stand-in chips", "guessed latency"),
    )


def price(lay) -> Prices:
    return stated_prices(
        lay.graph,
        {
            "0F": 1.0, "0B": 3.0, "1F": 1.0, "1B": 2.0, "OPT": 0.5, "REDUCE_GRAD": 1.0,
            "ALL_GATHER": 0.0, "SEND_B": 0.0,
            "SEND_F": StatedFlow(links=("wan",), nbytes=5.0),
        },
        {"wan": 10.0},
    )  # fmt: skip


def simulated() -> Run:
    return run_layout(lay_out(plan(), seed=7), price)


def reported() -> Report:
    problem = Problem(
        machine=machine(), model=model(), job=None, documents={}, hash="0123456789abcdef"
    )  # type: ignore[arg-type]
    memory = {}
    for r in (0, 1):
        memory[0, r] = Ledger(
            terms={"parameters": 4e9, "activations": 8e9}, capacity_bytes=16e9, limit_bytes=14e9
        )
        memory[1, r] = Ledger(terms={"activations": 15.1e9}, capacity_bytes=16e9, limit_bytes=14e9)
    return report_of(simulated(), problem, memory=memory)


def as_json(document: object) -> dict[str, object]:
    decoded: dict[str, object] = msgspec.json.decode(msgspec.json.encode(document))
    return decoded


def test_plan_document_has_the_agreed_keys() -> None:
    search = SearchFacts(space=1200, evaluated=40, pruned=1160, wall_s=1.5)
    found = as_json(reported().plan_document(search))
    assert found["schema"] == "hetlab.plan/1"
    assert found["metrics"].keys() >= METRICS
    assert found["search"] == {"space": 1200, "evaluated": 40, "pruned": 1160, "wall_s": 1.5}
    assert (found["exact"], found["seed"], found["spec_hash"]) == (True, 7, "0123456789abcdef")
    assert found["plan_hash"] == plan().hash
    assert found["assumptions"] == ["stand-in chips", "guessed latency"]
    assert found["version"]
    first, second = found["stages"]
    assert first == {
        "index": 0, "layers": 4, "blocks": [[0, 8]],
        "cells": [
            {
                "accelerator": "V100", "replicas": 2, "num_chips": 4, "tp": 2, "cp": 1,
                "microbatches": 4, "recompute": "full", "peak_memory_bytes": 12e9,
                "memory_bytes": 16e9, "verdict": "fits", "host_fits": True,
            }
        ],
    }  # fmt: skip
    # Half of layer 3 sits on each stage; it counts once, where it begins.
    assert (second["index"], second["layers"]) == (1, 1)


def test_simulate_document_adds_the_engines_facts() -> None:
    found = as_json(reported().simulate_document())
    assert found["schema"] == "hetlab.simulate/1"
    assert found["metrics"] == as_json(reported().plan_document())["metrics"]
    assert found["folded"] is True
    assert (found["num_ranks"], found["num_classes"]) == (6, 2)
    assert found["events"] > 0
    assert found["cpu_s"] > 0
    assert [link["name"] for link in found["per_link"]] == ["wan"]
    assert found["per_link"][0].keys() == {"name", "bytes", "busy_fraction"}


def test_metrics_of_the_report_by_hand() -> None:
    report = reported()
    # 8 sequences of 10 tokens through 10 products of 100 x 100; stage 0 (7 of them) recomputes.
    assert report.basis.model_flops_per_step == 3 * 80 * 10 * 2e4
    assert report.basis.hardware_flops_per_step == (3 * 10 + 7) * 80 * 2e4
    assert report.basis.peak_flops_per_s == 4 * 6e5 + 2 * 4e5
    sent = report.links[0].nbytes
    cost = 6 * 0.0005 * report.metrics.step_time_s + sent * 0.01
    assert report.metrics.cost_per_mtoken == pytest.approx(cost / 80 * 1e6)
    assert "mixed" in repr(report)


def test_unknown_memory_is_null_not_a_guess() -> None:
    rows = stages_of(plan(), model())
    assert rows[0].cells[0].peak_memory_bytes is None
    assert rows[0].cells[0].verdict == "unknown"


def test_unlike_replicas_get_a_row_each() -> None:
    base = plan()
    uneven = msgspec.structs.replace(
        base, placement=msgspec.structs.replace(base.placement, microbatches=(5, 3))
    )
    rows = stages_of(uneven, model())
    assert [(c.replicas, c.microbatches) for c in rows[0].cells] == [(1, 5), (1, 3)]
    assert sum(r.layers for r in rows) == 5


def test_formula_priced_bytes_count_on_the_links_they_cross() -> None:
    run = simulated()
    reduce = [i for i, op in enumerate(run.layout.graph.ops) if op.kind == "REDUCE_GRAD"]
    carried = dict.fromkeys(reduce, ((0, 100.0),))
    prices = msgspec.structs.replace(run.prices, carried=carried)
    (before,), (busy_before,) = link_use(run)
    (after,), (busy_after,) = link_use(msgspec.structs.replace(run, prices=prices))
    assert after == before + 100 * len(reduce)
    # Both stages reduce for a second each; where they overlap the link is busy once.
    start = sorted(run.outcome.start[reduce].tolist())
    assert busy_after - busy_before == pytest.approx(1 + min(1, start[1] - start[0]))


def printed(show, document, width: int = 110) -> str:
    console = Console(file=StringIO(), width=width, no_color=True)
    show(console, document)
    lines = console.file.getvalue().splitlines()
    assert [x for x in lines if x != x.rstrip()] == []
    return "\n".join(lines)


def test_golden_table_of_a_plan() -> None:
    search = SearchFacts(space=1200, evaluated=40, pruned=1160, wall_s=1.5)
    document = msgspec.structs.replace(
        reported().plan_document(search), plan_hash="fedcba9876543210", version="0.1.0"
    )
    assert printed(print_plan, document) == GOLDEN_PLAN.strip("\n")


def test_table_of_a_simulation_shows_links_and_engine() -> None:
    document = msgspec.structs.replace(reported().simulate_document(), cpu_s=0.0125)
    text = printed(print_simulation, document)
    assert "simulated: 1 step, 6 ranks as 2 classes," in text
    assert "12.5 ms of processor time" in text
    assert "busiest links" in text


def test_equal_neighbouring_stages_share_a_line() -> None:
    base = reported().plan_document()
    row = base.stages[1]
    stages = tuple(msgspec.structs.replace(row, index=i) for i in range(1, 9))
    text = printed(print_plan, msgspec.structs.replace(base, stages=(base.stages[0], *stages)))
    line = next(x for x in text.splitlines() if x.strip().startswith("1-8"))
    assert "1 each" in line
    assert "2 each" in line


def test_an_inexact_plan_says_so_first() -> None:
    document = msgspec.structs.replace(reported().plan_document(), exact=False, reason="stale by 1")
    lines = printed(print_plan, document).splitlines()
    assert lines[1].split() == ["inexact", "stale", "by", "1"]


def test_the_answer_names_settings_idle_chips_and_uncalibrated_types() -> None:
    idle = msgspec.structs.replace(machine().nodes[1], index=2, chips=(6, 9))
    larger = msgspec.structs.replace(machine(), nodes=(*machine().nodes, idle))
    problem = msgspec.structs.replace(reported().problem, machine=larger)
    document = report_of(simulated(), problem, memory={}).plan_document()
    assert document.unused == {"T4": 3}
    assert document.uncalibrated == ("V100", "T4")
    lines = printed(print_plan, document).splitlines()
    assert lines[1].startswith("uncalibrated   no run was used to calibrate V100, T4")
    assert "not used       3 T4" in lines
    assert "settings       schedule 1f1b, microbatch 1, ZeRO 0" in lines
    known = {
        n: msgspec.structs.replace(a, calibrated=True) for n, a in machine().accelerators.items()
    }
    sure = msgspec.structs.replace(
        problem, machine=msgspec.structs.replace(machine(), accelerators=known)
    )
    document = report_of(simulated(), sure, memory={}).plan_document()
    assert (document.unused, document.uncalibrated) == ({}, ())
    assert "uncalibrated" not in printed(print_plan, document)


def test_the_schedule_is_named_with_what_varies_it() -> None:
    def named(*args: object) -> str:
        varied = msgspec.structs.replace(plan(), lowering=standard_calls(*args))  # type: ignore[arg-type]
        return plan_document(varied, reported().basis, reported().metrics).schedule

    assert named("interleaved", 2, False, False, (), ()) == "interleaved of 2 chunks"
    assert named("1f1b", 1, True, False, (), ()) == "1f1b with split backward"


def test_long_times_are_in_hours() -> None:
    base = reported().plan_document()
    slow = msgspec.structs.replace(base.metrics, step_time_s=5400.0)
    text = printed(print_plan, msgspec.structs.replace(base, metrics=slow))
    assert "step time      1.5 h" in text


def test_nothing_is_cut_off_at_80_columns() -> None:
    base = reported().plan_document()
    cell = msgspec.structs.replace(
        base.stages[0].cells[0],
        accelerator="V100-SXM2-16GB", recompute="selective", verdict="does not fit",
    )  # fmt: skip
    stages = tuple(
        msgspec.structs.replace(base.stages[0], index=i, cells=(cell,)) for i in range(9)
    )
    text = printed(print_plan, msgspec.structs.replace(base, stages=stages), width=80)
    assert "\u2026" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert "V100-SXM2-16GB" in text
    assert "does not fit" in text


GOLDEN_PLAN = """
mixed
uncalibrated   no run was used to calibrate V100, T4: times are estimates
step time      20.5 s
throughput     3.902 tokens/s, 0.6504 per chip
MFU            73.2 % of 3.2 MFLOP/s (dense fp16, 6 chips)
HFU            90.2 % with recomputation counted
bubble         26.0 % of compute time is idle
exposed comm.  1.833 s a step, mean over chips: dp 1 s, pp 833.3 ms
               at most 2.5 s, on rank 4
cost           3269 USD per million tokens
settings       schedule 1f1b, microbatch 1, ZeRO 0

                                                                     peak
stage   layers   accelerator   chips   dp   tp   m   recompute     memory   verdict
─────────────────────────────────────────────────────────────────────────────────────────
0            4   V100              4    2    2   4   full        11.2 GiB   fits, 75 %
1            1   T4                2    2    1   4   none        14.1 GiB   at risk, 94 %
dp: replicas; tp: chips that split a layer; m: microbatches per replica

search: 1,200 candidates, 1,160 pruned, 40 evaluated in 1.5 s
assumed:
  - stand-in chips
  - guessed latency
plan fedcba9876543210, spec 0123456789abcdef, seed 7, hetlab 0.1.0
"""
