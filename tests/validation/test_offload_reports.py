"""Faults that users of offloading reported: what copies cost, and what still lives on the chip."""

from __future__ import annotations

from io import StringIO

import msgspec
import pytest
from rich.console import Console

from sim.cost.ledger import Ledger, knobs_of, peak_memory
from sim.cost.offload import HostLedger, host_ledgers
from sim.engine.faults import Straggler
from sim.engine.simulate import simulate
from sim.hardware.machine import HostSide
from sim.plan.draft import CellKnobs, DataKnobs, PipelineKnobs, PlanDraft
from sim.plan.lower import lower
from sim.plan.plan import Amount
from sim.plan.validate import validate
from sim.problem import load_problem
from sim.report.links import link_use
from sim.report.report import report_of
from sim.report.table import print_simulation
from strategies.compose import compose
from tests.validation.exercise import BACKWARD, FORWARD, model
from tests.validation.host_side import offloaded

# 3. An estimate that counted model states only

LAYERS, HIDDEN, HEADS, SEQUENCE, BATCH = 32, 4096, 32, 2048, 4
STATES_AWAY = ("parameters", "optimizer")


def everything_on_the_host(recompute: bool) -> tuple[Ledger, HostLedger]:
    """Memory of 6.8e9 parameters on 4 chips of one node, all states in host memory."""
    config = {
        "model_type": "gpt2",
        "n_embd": HIDDEN,
        "n_layer": LAYERS,
        "n_head": HEADS,
        "vocab_size": 43000,
        "n_positions": SEQUENCE,
        "tie_word_embeddings": False,
    }
    job = {
        "global_batch": 4 * BATCH,
        "sequence_length": SEQUENCE,
        "microbatch": BATCH,
        "flash_attention": False,
        "dropout": True,
    }
    nodes = {"profile": "a100_80gb_hdr", "count": 1, "chips": 4}
    cluster = {"name": "four", "sites": [{"name": "hall", "nodes": [nodes]}]}
    given = load_problem(cluster, config, job)
    params = sum(b.params + b.params_replicated for b in given.model.blocks)
    assert params == pytest.approx(6.805e9, rel=0.005)
    draft = PlanDraft(
        cells=tuple(CellKnobs(stage=0, replica=r, chips=(r,)) for r in range(4)),
        pipeline=PipelineKnobs(microbatch=BATCH),
        data=DataKnobs(microbatches=(1,) * 4),
    )
    draft = compose(given, [("offload", {"checkpointed": LAYERS * recompute})], start=draft)
    segments = tuple(
        msgspec.structs.replace(s, offload=STATES_AWAY) for s in draft.offload.segments
    )
    offload = msgspec.structs.replace(draft.offload, segments=segments)
    plan = lower(given, msgspec.structs.replace(draft, offload=offload))
    validate(plan)
    return peak_memory(plan, given)[0, 0], host_ledgers(plan, given, knobs_of)[0]


LAYER = SEQUENCE * BATCH * HIDDEN * (34 + 5 * HEADS * SEQUENCE / HIDDEN)
"""[B] kept of one layer, s b h (34 + 5 a s / h) = 3.83 GB."""


def test_activations_that_do_not_fit_are_not_left_out() -> None:
    ledger, host = everything_on_the_host(recompute=False)
    assert pytest.approx(3.83e9, rel=0.002) == LAYER
    assert ledger.verdict == "does not fit"
    assert ledger.terms["activations"] == pytest.approx(LAYERS * LAYER, rel=0.01)
    assert ledger.terms["activations"] > 122e9
    assert host.verdict == "fits"


def test_with_recomputation_each_term_stands_for_itself() -> None:
    ledger, host = everything_on_the_host(recompute=True)
    checkpoints = 2 * SEQUENCE * BATCH * HIDDEN * LAYERS
    terms = ledger.terms
    assert terms["activations"] == pytest.approx(checkpoints, rel=0.2)
    assert terms["activations"] > checkpoints == pytest.approx(2.15e9, rel=0.002)
    assert terms["working"] > LAYER
    layer = 12 * HIDDEN**2
    assert terms["gathered"] > 2 * 2 * layer
    assert terms["gradients"] > 2 * 4 * layer
    for name in ("logits", "allocator gap", "context"):
        assert terms[name] > 0.5e9 / 10
    assert terms["optimizer"] == terms["parameters"] == 0
    assert ledger.peak_bytes > 6e9
    assert ledger.verdict == "fits"
    assert all(name in ledger.table() for name in terms)
    assert host.peak_bytes == pytest.approx(4 * 6.805e9 * (12 + 4 + 2), rel=0.005)


# 6. Optimizer states that live on the host cost 12 B per parameter over the host link

PARAMS = 300_000_000
STATES = Amount(nbytes=12.0 * PARAMS)
FETCHED = "F0 B0 REDUCE_GRAD ; H2D[states] <- REDUCE_GRAD ; OPT <- H2D[states]"
RESIDENT = "F0 B0 REDUCE_GRAD OPT"


def added(**machine: object) -> float:
    """What fetching the states adds to a step [s]."""
    times = []
    for text in (FETCHED, RESIDENT):
        given, plan = offloaded(text, {"H2D[states]": STATES}, params=PARAMS, **machine)  # type: ignore[arg-type]
        validate(plan)
        times.append([simulate(plan, given, fold=fold).makespan for fold in (True, False)])
    assert times[0][0] == pytest.approx(times[0][1], rel=1e-12)
    assert times[1][0] == pytest.approx(FORWARD + BACKWARD, rel=1e-6)
    return times[0][0] - times[1][0]


@pytest.mark.parametrize(("rate", "seconds"), [(16e9, 0.225), (25e9, 0.144)])
def test_states_over_the_host_link(rate: float, seconds: float) -> None:
    assert added(pcie_rate=rate) == pytest.approx(seconds, rel=1e-9)


def test_two_chips_behind_one_switch_take_twice_as_long() -> None:
    shared = HostSide(shared_by=2, shared_rate=16e9)
    assert added(chips=2, host=shared) == pytest.approx(0.45, rel=1e-9)
    assert added(chips=2) == pytest.approx(0.225, rel=1e-9)
    assert added(chips=4, nodes=2, host=shared) == pytest.approx(0.45, rel=1e-9)


def test_the_link_report_says_where_the_time_went() -> None:
    given, plan = offloaded(FETCHED, {"H2D[states]": STATES}, params=PARAMS)
    run = simulate(plan, given)
    nbytes, busy = link_use(run)
    at = run.prices.link_names.index("node0/chip0/h2d")
    assert nbytes[at] == pytest.approx(3.6e9)
    assert busy[at] == pytest.approx(0.225)


def line_of(text: str, slower: float) -> list[str]:
    """Words that the report prints about the h2d stream, on chips that compute this much slower."""
    given, plan = offloaded(text, {"H2D[states]": STATES}, params=PARAMS)
    slow = model(1, params=PARAMS, speeds={"chip": 1 / slower})
    given = msgspec.structs.replace(given, model=slow)
    report = report_of(simulate(plan, given, steps=4), given)
    out = StringIO()
    print_simulation(Console(file=out, width=100), report.simulate_document())
    return next(line.split() for line in out.getvalue().splitlines() if line.startswith("h2d"))


def test_the_report_prints_the_copy_and_whether_compute_hides_it() -> None:
    said = ["h2d", "3.60", "GB", "0.225", "s", "at", "16.0", "GB/s,"]
    assert line_of(FETCHED, 1.0) == [*said, "exposed", "0.225", "s"]
    early = "F0 ; H2D[states] <- F0 ; B0 ; REDUCE_GRAD ; OPT <- REDUCE_GRAD, H2D[states]"
    # Beside a backward of 0.02 s it is hidden for that long, beside one of 0.4 s altogether.
    assert line_of(early, 1.0) == [*said, "exposed", "0.205", "s"]
    assert line_of(early, 20.0) == [*said, "hidden", "by", "compute"]


def test_a_slow_chip_does_not_slow_its_copies() -> None:
    given, plan = offloaded(FETCHED, {"H2D[states]": STATES}, params=PARAMS)
    slow = simulate(plan, given, faults=(Straggler(ranks=(0,), factor=20.0),)).makespan
    computes = simulate(plan, given).makespan - 0.225
    assert slow == pytest.approx(20 * computes + 0.225, rel=1e-9)
