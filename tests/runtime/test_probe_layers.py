"""Whole layers correct what single kernels say of a chip."""

from __future__ import annotations

import msgspec
import pytest

from real_runtime.probe.layers import LAYERS, corrected, layers_of
from real_runtime.probe.records import ProbeSettings, Record
from sim.cost.compute import Shape, block_time
from sim.hardware.machine import Accelerator

CHIP = Accelerator(
    name="x", memory_bytes=1, memory_bytes_per_s=2e10, peak_flops_per_s={"fp32": 1e11},
    gemm_efficiency=0.9, gemm_half=8.0, attention_efficiency=0.3, memory_efficiency=0.6,
    kernel_overhead_s=5e-5,
)  # fmt: skip


def timed(chip: Accelerator) -> list[Record]:
    """What a chip that obeys the cost model would be measured at."""
    found = []
    for hidden, ffn, heads, batch, length in ProbeSettings().layers:
        numbers = {"hidden": hidden, "ffn": ffn, "heads": heads, "batch": batch, "length": length}
        sizes = {k: float(v) for k, v in numbers.items()}
        shape = Shape(microbatch=batch, sequence_length=length)
        times = [block_time(b, chip, shape, "fp32") for b in layers_of(sizes)]
        forward = sum(t.forward for t in times)
        for name, seconds in (
            ("forward", forward), ("both", forward + sum(t.backward for t in times)),
        ):  # fmt: skip
            found.append(
                Record(what="layer", name=f"fp32 {name}", sizes=sizes, median=seconds, low=seconds,
                       high=seconds, repeats=9)
            )  # fmt: skip
    return found


def test_a_record_times_every_block_of_its_layers_and_no_other() -> None:
    blocks = layers_of(timed(CHIP)[0].sizes)
    assert [b.layer for b in blocks] == [n for n in range(LAYERS) for _ in range(2)]
    assert {b.kind for b in blocks} == {"attention", "mlp"}


def test_what_slows_in_layers_is_found_and_what_does_not_stays() -> None:
    slower = msgspec.structs.replace(
        CHIP, gemm_efficiency=0.9 * 0.8, attention_efficiency=0.3 * 0.7, kernel_overhead_s=6e-5
    )
    c = corrected(CHIP, timed(slower))
    assert c.gemm == pytest.approx(0.8, rel=0.02)
    assert c.attention == pytest.approx(0.7, rel=0.1)
    assert c.memory == pytest.approx(1.0, rel=0.2)
    assert c.residual < 0.01
    same = corrected(CHIP, timed(CHIP))
    assert (same.gemm, same.attention, same.memory, same.overhead) == pytest.approx((1,) * 4)


def test_without_layers_nothing_changes() -> None:
    assert corrected(CHIP, []).count == 0
