"""Amounts of blocks under splitting, and the time they take."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.cost.compute import Shape as RankShape
from sim.cost.compute import block_time, compute_dtype, gemm_efficiency, optimizer_time
from sim.cost.measured import MeasuredTimes
from sim.errors import InputError
from sim.hardware.machine import Accelerator
from sim.model.amounts import (
    attention_flops,
    backward_flops,
    block_table,
    dtype_bytes,
    forward_flops,
    rank_gemms,
    rank_params,
    saved_bytes,
)
from sim.model.count import total_params
from sim.model.graph import Block, MeasuredTime, Model
from sim.model.shape import Moe, Shape
from sim.model.transformer import build_model
from sim.spec.job import Job

CHIP = Accelerator(
    name="chip",
    memory_bytes=80e9,
    memory_bytes_per_s=2e12,
    peak_flops_per_s={"bf16": 3e14, "fp16": 3e14, "fp32": 2e13},
)


def gpt(flash: bool = False, dropout: bool = True, tied: bool = True, moe: bool = False) -> Model:
    shape = Shape(
        name="gpt",
        family="gpt2",
        num_layers=4,
        hidden=1024,
        heads=16,
        kv_heads=16,
        head_dim=64,
        v_head_dim=64,
        ffn=4096,
        gated=False,
        vocab=32000,
        max_seq=1024,
        tied=tied,
        moe=Moe(num_experts=8, top_k=2, ffn=2048) if moe else None,
    )
    return build_model(shape, flash=flash, dropout=dropout)


BLOCKS = st.sampled_from([*gpt().blocks, *gpt(moe=True, flash=True).blocks])
TP = st.sampled_from([1, 2, 4, 8])


@given(BLOCKS, TP, st.sampled_from([1, 2, 4]), st.integers(1, 4096))
def test_tp_and_ep_shares_of_the_products_sum_to_the_whole(
    block: Block, tp: int, ep: int, tokens: int
) -> None:
    ep = ep if block.num_experts else 1
    whole = forward_flops(block, tokens, 512) - attention_flops(block, tokens, 512)
    total = 0.0
    for gemm, (m, n, k, count) in zip(block.gemms, rank_gemms(block, tokens, tp, ep), strict=True):
        copies = tp if gemm.split != "none" else 1  # unsplit products are repeated, not shared
        total += 2 * m * n * k * count * copies
    assert total == pytest.approx(whole)  # routed: ep ranks with ep times the tokens


@given(BLOCKS, st.integers(1, 4096), st.integers(1, 4096))
def test_backward_is_twice_forward(block: Block, tokens: int, seq: int) -> None:
    input_grad, weight_grad = backward_flops(block, tokens, seq)
    assert input_grad + weight_grad == pytest.approx(2 * forward_flops(block, tokens, seq))
    assert input_grad - weight_grad == pytest.approx(2 * attention_flops(block, tokens, seq))


@given(BLOCKS, TP, st.booleans(), st.integers(1, 2000))
def test_more_work_never_takes_less_time(block: Block, tp: int, sp: bool, tokens: int) -> None:
    def times(seq: int, width: int) -> tuple[float, ...]:
        shape = RankShape(microbatch=1, sequence_length=seq, tp=width, sequence_parallel=sp)
        t = block_time(block, CHIP, shape, "bf16")
        return t.forward, t.input_grad, t.weight_grad

    for less, more in zip(times(tokens, tp), times(tokens + 100, tp), strict=True):
        assert less <= more
    for whole, part in zip(times(tokens, 1), times(tokens, tp), strict=True):
        assert part <= whole * (1 + 1e-12)


@given(st.floats(1, 1e5), st.floats(1, 1e5), st.floats(1, 1e5))
def test_gemm_efficiency_is_the_stated_curve(m: float, n: float, k: float) -> None:
    d, e0 = CHIP.gemm_half, CHIP.gemm_efficiency
    got = gemm_efficiency(CHIP, m, n, k)
    assert got == pytest.approx(e0 * m * n * k / ((m + d) * (n + d) * (k + d)))
    assert got < e0


def test_recomputation_repeats_what_it_dropped() -> None:
    attention, mlp, head = gpt().blocks[1], gpt().blocks[2], gpt().blocks[-1]
    for block in (attention, mlp):
        full = RankShape(microbatch=1, sequence_length=512, recompute="full")
        t = block_time(block, CHIP, full, "bf16")
        assert t.recompute == t.forward and t.flops[3] == t.flops[0]
    some = RankShape(microbatch=1, sequence_length=512, recompute="selective")
    assert block_time(mlp, CHIP, some, "bf16").recompute == 0.0
    core = block_time(attention, CHIP, some, "bf16")
    assert 0 < core.recompute < core.forward
    assert core.flops[3] == attention_flops(attention, 512, 512)
    assert block_time(head, CHIP, full, "bf16").recompute == 0.0


def test_a_missing_dtype_falls_back_and_says_so() -> None:
    volta = Accelerator(
        name="V", memory_bytes=1, memory_bytes_per_s=1, peak_flops_per_s={"fp16": 1, "fp32": 1}
    )
    assert compute_dtype(volta, "bf16") == ("fp16", "V has no bf16: it computes in fp16")
    assert compute_dtype(volta, "fp8")[0] == "fp16"
    assert compute_dtype(volta, "fp32") == ("fp32", "")
    none = Accelerator(name="N", memory_bytes=1, memory_bytes_per_s=1, peak_flops_per_s={"fp8": 1})
    with pytest.raises(InputError, match="cannot compute in fp32"):
        compute_dtype(none, "fp32")
    with pytest.raises(InputError, match="unknown dtype"):
        dtype_bytes("int4")


def test_the_optimizer_moves_its_bytes() -> None:
    job = Job(global_batch=1, sequence_length=1)  # bf16, fp32 gradients, Adam with master weights
    rate = CHIP.memory_bytes_per_s * CHIP.memory_efficiency
    want = 1e9 * (4 + 2 * 12 + 2) / rate + CHIP.kernel_overhead_s
    assert optimizer_time(CHIP, job, 1e9) == pytest.approx(want)
    assert optimizer_time(CHIP, job, 1e9, update=0.5) == 0.5


# -- measured times -----------------------------------------------------------------------------


def measured(**over: float) -> Model:
    entry = {"forward": 2.0, "input_grad": 4.0, "weight_grad": 0.0} | over
    times = tuple(
        MeasuredTime(block="x", accelerator="chip", tp=t, microbatch=m, **entry)  # type: ignore[arg-type]
        for t, m in ((1, 1), (2, 4))
    )
    block = Block(name="x", kind="measured", layer=0)
    return Model(name="m", family="measured", blocks=(block,), edges=(), num_layers=1, times=times)


def test_measured_times_replace_the_roofline() -> None:
    model = measured()
    table, block = MeasuredTimes(model), model.blocks[0]
    one = RankShape(microbatch=1, sequence_length=8)
    t = block_time(block, CHIP, one, "bf16", table)
    assert (t.forward, t.input_grad, t.weight_grad) == (2.0, 2.0, 2.0)  # halves of the backward
    assert t.backward == 4.0 and t.measured and t.recompute == 0.0
    full = RankShape(microbatch=1, sequence_length=8, recompute="full")
    assert block_time(block, CHIP, full, "bf16", MeasuredTimes(measured())).recompute == 2.0
    with_again = MeasuredTimes(measured(recompute=0.5, weight_grad=1.0))
    t = block_time(block, CHIP, full, "bf16", with_again)
    assert (t.input_grad, t.weight_grad, t.recompute) == (4.0, 1.0, 0.5)


def test_a_split_that_was_not_measured_names_the_nearest() -> None:
    model = measured()
    table, block = MeasuredTimes(model), model.blocks[0]
    asked = RankShape(microbatch=3, sequence_length=8, tp=2)
    with pytest.raises(InputError, match="expected tp 2, microbatch 4 or tp 1, microbatch 1"):
        block_time(block, CHIP, asked, "bf16", table)
    with pytest.raises(InputError, match="cp 2"):
        block_time(block, CHIP, RankShape(microbatch=1, sequence_length=8, cp=2), "bf16", table)
    other = Accelerator(
        name="other", memory_bytes=1, memory_bytes_per_s=1, peak_flops_per_s={"bf16": 1.0}
    )
    with pytest.raises(InputError, match="no measured time of x on other"):
        block_time(block, other, RankShape(microbatch=1, sequence_length=8), "bf16", table)


# -- the table ----------------------------------------------------------------------------------


@given(
    st.sampled_from([gpt(), gpt(flash=True, moe=True), gpt(tied=False)]),
    st.data(),
    TP,
    st.booleans(),
    st.sampled_from(["none", "selective"]),
)
def test_ranges_of_the_table_are_sums_over_blocks(
    model: Model, data: st.DataObject, tp: int, sp: bool, mode: str
) -> None:
    n = len(model.blocks)
    first = data.draw(st.integers(0, n - 1))
    last = data.draw(st.integers(first + 1, n))
    table = block_table(model, 512, 2)
    blocks = model.blocks[first:last]
    assert table.total("flops", first, last) == pytest.approx(
        sum(forward_flops(b, 1.0, 512) for b in blocks)
    )
    dense, experts = table.rank_params(first, last, tp)
    assert (dense, experts) == pytest.approx(rank_params(blocks, tp))
    kept = sum(
        saved_bytes(b, 1.0, 512, 2, tp=tp, sequence_parallel=sp, recompute=mode)  # type: ignore[arg-type]
        for b in blocks
    )
    assert table.kept_per_token(first, last, mode, tp, sp) == pytest.approx(kept)  # type: ignore[arg-type]


def test_a_tied_weight_counts_once_where_both_ends_meet() -> None:
    model = gpt(tied=True)
    table, n = block_table(model, 512, 2), len(model.blocks)
    dense, _ = table.rank_params(0, n)
    assert dense == total_params(model)
    halves = table.rank_params(np.array([0, 3]), np.array([3, n]))[0]
    assert halves.sum() == total_params(model) + 32000 * 1024


def test_full_recomputation_keeps_each_layers_input_once() -> None:
    model = gpt()
    table, n = block_table(model, 512, 2), len(model.blocks)
    outside = sum(saved_bytes(b, 1.0, 512, 2) for b in (model.blocks[0], model.blocks[-1]))
    assert table.kept_per_token(0, n, "full") == pytest.approx(outside + 4 * 1024 * 2)
    # a cut inside a layer makes both sides keep an input
    assert table.kept_per_token(1, 2, "full") + table.kept_per_token(2, 3, "full") == 2 * 1024 * 2
    assert table.kept_per_token(1, 3, "full", 4, True) == 1024 * 2 / 4


def test_a_gpt_layer_keeps_the_closed_form() -> None:
    """Korthikanti et al. 2022: s b h (34 + 5 a s / h) bytes, of which 5 a s / h in the core."""
    model = gpt()
    s, h, a = 512, 1024, 16
    layer = model.blocks[1:3]
    whole = sum(saved_bytes(b, s, s, 2) for b in layer)
    assert whole == pytest.approx(s * h * (34 + 5 * a * s / h))
    some = sum(saved_bytes(b, s, s, 2, recompute="selective") for b in layer)
    assert some == pytest.approx(s * h * 34)
    split = sum(saved_bytes(b, s, s, 2, tp=8, sequence_parallel=True) for b in layer)
    assert split == pytest.approx(whole / 8)
    tp_only = sum(saved_bytes(b, s, s, 2, tp=8) for b in layer)
    assert tp_only == pytest.approx(s * h * (10 + 24 / 8 + 5 * a * s / h / 8))
