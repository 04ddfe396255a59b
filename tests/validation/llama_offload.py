"""LLaMA-7B on 8 x A800 under ZeRO-2 and 3 with offloading, as somebody measured it, and ours.

Source: https://gist.github.com/chenyaofo/d4cd6a20ab4b95cb3a49491747e2139a (8 x A800, 2 x Xeon 8358,
1 TB, sequence 4096, DeepSpeed 0.14.2). Found: batch per device and per update, so the number of
microbatches; memory as max_memory_allocated. The unit of the throughput is not stated; sequences/s
is our reading. Ours: A100-80GB with NVLink of 200 GB/s stands in for A800; PCIe of 25 GB/s, fused
attention, 0.45 of the peak; and ONE number fitted to one row, what the host takes for an update.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from sim.cost.ledger import peak_memory
from sim.engine.simulate import simulate
from sim.plan.draft import CellKnobs, DataKnobs, PipelineKnobs, PlanDraft
from sim.plan.lower import lower
from sim.problem import Problem, load_problem
from sim.report.report import report_of
from strategies.compose import compose
from strategies.offload.autohete import AutoHeteKnobs

__all__ = ["FITTED", "FITTED_NS", "MEASURED", "Measured", "Ours", "ours", "table_lines"]

CHIPS, SEQUENCE, LAYERS = 8, 4096, 32
EFFICIENCY = 0.45
FITTED_NS = 2.4
"""[ns] per parameter, fitted to row ``FITTED``: far more than the 0.25 to 1 of other machines."""
FITTED = 6


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the source.

    Args:
        zero: stage. recompute, optimizer, parameters: layers recomputed; on the host.
        microbatch, batch: [sequences] of a device, of an update.
        memory_gb: most allocated. throughput: unit not stated.
    """

    zero: int
    recompute: bool
    optimizer: bool
    parameters: bool
    microbatch: int
    batch: int
    memory_gb: float
    throughput: float

    @property
    def label(self) -> str:
        """What the row switches on."""
        parts = [f"ZeRO-{self.zero}"]
        parts += ["recompute"] * self.recompute + ["optimizer"] * self.optimizer
        return " ".join(parts + ["parameters"] * self.parameters)


def _row(*values: float) -> Measured:
    return Measured(
        zero=int(values[0]),
        recompute=bool(values[1]),
        optimizer=bool(values[2]),
        parameters=bool(values[3]),
        microbatch=int(values[4]),
        batch=int(values[5]),
        memory_gb=values[6],
        throughput=values[7],
    )


MEASURED = (
    _row(2, 0, 0, 0, 1, 64, 44.8, 5.33),
    _row(2, 1, 0, 0, 1, 64, 23.5, 4.19),
    _row(2, 1, 1, 0, 1, 64, 16.9, 1.81),
    _row(2, 1, 0, 0, 4, 64, 38.6, 4.69),
    _row(3, 0, 0, 0, 2, 64, 75.7, 4.95),
    _row(3, 1, 0, 0, 2, 64, 20.4, 4.45),
    _row(3, 1, 1, 0, 2, 64, 9.4, 2.05),
    _row(3, 1, 1, 1, 4, 64, 7.9, 2.06),
    _row(3, 1, 0, 0, 8, 64, 39.1, 4.73),
    _row(3, 1, 0, 0, 8, 128, 63.9, 4.32),
)


class Ours(msgspec.Struct, frozen=True, kw_only=True):
    """What we predict of a row. Args: throughput [sequences/s], memory_gb allocated."""

    throughput: float
    memory_gb: float


def ours(row: Measured, update_ns: float = FITTED_NS) -> Ours:
    """Simulate a row.

    Args:
        row: what. update_ns: of the host, per parameter.
    """
    problem, start = _case(row, update_ns)
    knobs = AutoHeteKnobs(
        checkpointed=LAYERS * row.recompute,
        parameters=LAYERS * row.parameters,
        optimizer=LAYERS * row.optimizer,
        outer=row.optimizer,
        clipping="global",
        priority=False,
        whole_steps=True,
    )
    plan = lower(problem, compose(problem, [("offload", knobs)], start=start))
    terms = peak_memory(plan, problem)[0, 0].terms
    # The source's number is the allocator's: without context and gap.
    allocated = sum(v for k, v in terms.items() if k not in ("context", "allocator gap"))
    seconds = report_of(simulate(plan, problem, steps=3), problem).metrics.step_time_s
    return Ours(throughput=row.batch / seconds, memory_gb=allocated / 1e9)


def _case(row: Measured, update_ns: float) -> tuple[Problem, PlanDraft]:
    node = {
        "accelerator": "A100-SXM4-80GB",
        "chips": CHIPS,
        "fabric": {"profile": "nvlink3", "rate": "200 GB/s"},
        "pcie": {"rate": "25 GB/s"},
        "host_memory": "1 TB",
        "host": {"update": f"{update_ns} ns"},
    }
    cluster = {
        "name": "8 x A800",
        "accelerators": {"A100-SXM4-80GB": {"gemm_efficiency": EFFICIENCY}},
        "sites": [{"name": "hall", "nodes": [node]}],
    }
    job = {
        "global_batch": row.batch,
        "sequence_length": SEQUENCE,
        "microbatch": row.microbatch,
        "gradient_dtype": "bf16",
    }
    microbatches = row.batch // CHIPS // row.microbatch
    draft = PlanDraft(
        cells=tuple(CellKnobs(stage=0, replica=r, chips=(r,)) for r in range(CHIPS)),
        pipeline=PipelineKnobs(microbatch=row.microbatch),
        data=DataKnobs(microbatches=(microbatches,) * CHIPS, zero=row.zero),
    )
    return load_problem(cluster, "llama2_7b", job), draft


def table_lines() -> Iterator[str]:
    """Every row, measured and ours."""
    yield f"LLaMA-7B on 8 chips, update {FITTED_NS} ns fitted to the row marked *"
    yield f"{'':<42}{'batch':>8}{'throughput':>11}{'ours':>7}{'':>7}{'GB':>8}{'ours':>7}"
    for i, row in enumerate(MEASURED):
        found = ours(row)
        off = f"{100 * (found.throughput / row.throughput - 1):+.0f} %"
        batch = f"{row.microbatch}/{row.batch}"
        yield (
            f"{row.label + ' *' * (i == FITTED):<42}{batch:>8}{row.throughput:>11.2f}"
            f"{found.throughput:>7.2f}{off:>7}{row.memory_gb:>8.1f}{found.memory_gb:>7.1f}"
        )
