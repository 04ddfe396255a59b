from __future__ import annotations

import numpy as np
import pytest

from sim.cost.ledger import Ledger, live_microbatches, memory_limit
from sim.cost.memory import TERMS, MemoryKnobs, stage_memory_terms
from sim.errors import PlanError
from sim.hardware.machine import Accelerator
from sim.model.amounts import block_table
from sim.model.graph import Model
from sim.model.shape import Shape
from sim.model.transformer import build_model
from sim.spec.job import Job


def gpt(layers: int, h: int, a: int, vocab: int) -> Model:
    shape = Shape(
        name="gpt",
        family="gpt2",
        num_layers=layers,
        hidden=h,
        heads=a,
        kv_heads=a,
        head_dim=h // a,
        v_head_dim=h // a,
        ffn=4 * h,
        gated=False,
        vocab=vocab,
        max_seq=1024,
        tied=True,
        layer_norm=True,
        positions=1024,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
    )
    return build_model(shape, flash=False, dropout=True)


def chip(gigabytes: float) -> Accelerator:
    return Accelerator(
        name=f"{gigabytes} GB",
        memory_bytes=gigabytes * 1e9,
        memory_bytes_per_s=1e12,
        peak_flops_per_s={"fp16": 1e14},
    )


def whole(
    model: Model, job: Job, accelerator: Accelerator, knobs: MemoryKnobs, live: int = 1
) -> Ledger:
    table = block_table(model, job.sequence_length, job.activation_bytes)
    n = len(model.blocks)
    terms = stage_memory_terms(table, job, accelerator, [[0]], [[n]], [[live]], knobs)
    assert tuple(terms) == TERMS
    return Ledger(
        terms={k: float(v[0]) for k, v in terms.items()},
        capacity_bytes=accelerator.memory_bytes,
        limit_bytes=memory_limit(accelerator, job),
    )


def test_user_report_3_activations_count_even_when_states_are_elsewhere() -> None:
    """32 layers, h 4096, 32 heads, seq 2048, mbs 4, 16-bit, no flash attention."""
    model = gpt(32, 4096, 32, 32000)
    job = Job(global_batch=4, sequence_length=2048, dtype="fp16", param_dtype="fp16")
    none = whole(model, job, chip(80), MemoryKnobs(microbatch=4))
    layer = 2048 * 4 * 4096 * (34 + 5 * 32 * 2048 / 4096)
    assert layer == pytest.approx(3.83e9, rel=2e-3)
    assert none.terms["activations"] == pytest.approx(122e9, rel=0.01)
    assert none.verdict == "does not fit" and none.margin_bytes < 0
    full = whole(model, job, chip(80), MemoryKnobs(microbatch=4, recompute="full"))
    embedding_and_head = full.terms["activations"] - 2 * 2048 * 4 * 4096 * 32
    assert 0 < embedding_and_head < 0.25e9
    assert full.terms["working"] == pytest.approx(layer, rel=0.05)
    assert full.terms["activations"] + full.terms["working"] > 5.9e9


def test_user_report_4_a_tight_fit_is_said_to_be_at_risk() -> None:
    """GPT-2 774M on 32 GB: 23.1 GB naively, 27.2 GB with fp32 gradients and logits."""
    model = gpt(36, 1280, 20, 50304)
    job = Job(global_batch=2, sequence_length=1024, dtype="fp16", param_dtype="fp16")
    found = whole(model, job, chip(32), MemoryKnobs(microbatch=2))
    t = found.terms
    states = t["parameters"] + t["gradient copy"] + t["optimizer"]
    assert states == pytest.approx(12.4e9, rel=0.01)
    assert t["activations"] == pytest.approx(10.8e9, rel=0.01)
    assert t["gradients"] == pytest.approx(3.1e9, rel=0.01)
    assert t["logits"] == pytest.approx(1.0e9, rel=0.04)
    before = states + t["activations"] + t["gradients"] + t["logits"]
    assert before == pytest.approx(27.2e9, rel=0.01)
    assert t["allocator gap"] > 0.04 * before and t["context"] == 1e9
    assert found.verdict == "at risk"
    assert 0 < found.margin_bytes < 0.1 * found.capacity_bytes
    assert "at risk" in found.table() and "allocator gap" in found.table()
    assert whole(model, job, chip(40), MemoryKnobs(microbatch=2)).verdict == "fits"
    assert whole(model, job, chip(24), MemoryKnobs(microbatch=2)).verdict == "does not fit"


def test_splitting_divides_what_it_should() -> None:
    model = gpt(8, 1024, 16, 2000)
    job = Job(global_batch=8, sequence_length=512)
    base = whole(model, job, chip(80), MemoryKnobs()).terms
    zero = whole(model, job, chip(80), MemoryKnobs(shards=8)).terms
    assert zero["optimizer"] == base["optimizer"] / 8
    assert all(zero[k] == base[k] for k in TERMS if k not in ("optimizer", "allocator gap"))
    tp = whole(model, job, chip(80), MemoryKnobs(tp=8, sequence_parallel=True)).terms
    assert tp["activations"] == pytest.approx(base["activations"] / 8)
    assert tp["logits"] == base["logits"] / 8
    assert tp["parameters"] > base["parameters"] / 8  # norms are on every rank
    assert base["gradient copy"] == 0.0  # bf16 accumulates straight into fp32
    some = whole(model, job, chip(80), MemoryKnobs(recompute="selective")).terms
    full = whole(model, job, chip(80), MemoryKnobs(recompute="full")).terms
    assert full["activations"] < some["activations"] < base["activations"]
    assert full["working"] > some["working"] > base["working"]
    twice = whole(model, job, chip(80), MemoryKnobs(), live=2).terms
    assert twice["activations"] == 2 * base["activations"]


def test_many_cells_at_once_equal_one_by_one() -> None:
    model = gpt(8, 1024, 16, 32000)
    job = Job(global_batch=8, sequence_length=512)
    table, knobs, n = block_table(model, 512, 2), MemoryKnobs(tp=2), len(model.blocks)
    first = np.array([[0, 9], [3, 12], [0, 5]])
    last = np.array([[3, 12], [9, n], [5, n]])
    live = np.array([[2, 1], [3, 1], [1, 4]])
    many = stage_memory_terms(table, job, chip(80), first, last, live, knobs)
    for i in range(3):
        one = stage_memory_terms(table, job, chip(80), first[i], last[i], live[i], knobs)
        for name in TERMS:
            assert many[name][i] == pytest.approx(one[name])


def test_microbatches_in_flight_follow_the_schedule() -> None:
    for m in (1, 3, 4, 100):
        assert live_microbatches("1f1b", 4, m) == tuple(((min(m, 4 - s),),) for s in range(4))
        assert live_microbatches("gpipe", 4, m) == (((m,),),) * 4
    # all of a split backward is held until W, so every position holds as many as the first
    assert live_microbatches("zb-h1", 4, 16) == (((4,),),) * 4
    # interleaved: 2 (P - s - 1) + (V - 1) P forwards first, then one more before each backward
    for s, vectors in enumerate(live_microbatches("interleaved", 4, 8, 2)):
        assert max(map(sum, vectors)) == 2 * (4 - s - 1) + 4 + 1
    assert live_microbatches("interleaved", 4, 64, 2) == live_microbatches("interleaved", 4, 32, 2)
    with pytest.raises(PlanError, match="unknown schedule"):
        live_microbatches("2f2b", 4, 4)
