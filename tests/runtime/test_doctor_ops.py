"""hetlab doctor ops: right operators pass, wrong and missing ones are named."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the runtime needs PyTorch")

from real_runtime.model.config import read_config  # noqa: E402
from real_runtime.model.decoder import Decoder  # noqa: E402
from real_runtime.ops import cases, check, train  # noqa: E402
from real_runtime.ops.records import FALLBACKS, TOLERANCES  # noqa: E402
from sim.cli import main  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def hetlab(*args: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(["doctor", "ops", "--device", "cpu", *args])
    return int(left.value.code or 0)


def test_every_operator_of_the_processor_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    kinds = ("bf16", "fp16", "fp32")
    assert hetlab("--json", "--align", "4", *(x for k in kinds for x in ("--dtype", k))) == 0
    found = json.loads(capsys.readouterr().out)
    seen = {(r["op"], r["dtype"]) for r in found["results"]}
    named = {(op.name, k) for op in cases.OPERATORS for k in kinds}
    assert seen == named | {(train.STEP, "bf16"), (train.STEP, "fp32")}
    assert {op.name for op in cases.OPERATORS} == set(FALLBACKS)
    by = {(r["op"], r["dtype"]): r["mean_relative_error"] for r in found["results"]}
    # bf16 keeps 8 bits of a number, fp16 11, fp32 24: each error lies near its own rounding.
    for kind, bits in (("bf16", 8), ("fp16", 11), ("fp32", 24)):
        assert 0.1 * 2.0**-bits < by["matmul", kind] < 2 * 2.0**-bits
    assert found["tolerances"]["bf16"] == {"atol": 1e-2, "rtol": 1e-3}
    assert "fp16" in found["skipped"][0]
    (aligned,) = found["alignment"]
    pairs = list(zip(aligned["losses"], aligned["reference"], strict=True))
    assert aligned["dtype"] == "bf16" and len(pairs) == 4
    mean = sum(abs(a - b) / b for a, b in pairs) / 4
    assert aligned["mean_relative_error"] == pytest.approx(mean, rel=1e-12) and mean > 0


def wrong(real: Any) -> Any:
    """Attention that is off by 5 % outside of the reference."""
    return lambda q, k, v: real(q, k, v) * (1.0 if q.dtype == torch.float64 else 1.05)


def test_a_wrong_operator_is_exit_code_5(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cases, "_core", wrong(cases._core))
    assert hetlab("--dtype", "fp32") == 5
    said = capsys.readouterr()
    assert "attention in fp32 on cpu" in said.err and "matmul" not in said.err
    assert re.search(r"attention +cpu +fp32 +OFF", said.out), said.out
    (found,) = (r for r in check.check_all("cpu", "fp32", 0) if r.op == "attention")
    assert found.mean_relative_error == pytest.approx(0.05, rel=1e-4)
    assert found.worst is not None and found.worst.found is not None
    assert found.worst.reference is not None
    gap = abs(found.worst.found - found.worst.reference)
    allowed = 1e-4 + 1e-5 * abs(found.worst.reference)
    assert found.worst.allowed_share == pytest.approx(gap / allowed)


def test_a_value_that_is_not_finite_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "_core", lambda q, k, v: q * (v.mean() + k.mean()) / 0.0)
    (found,) = (r for r in check.check_all("cpu", "fp32", 0) if r.op == "attention")
    assert not found.ok and found.worst is not None
    assert found.worst.found is None and found.worst.allowed_share is None


@pytest.mark.parametrize(("has_fp32", "way"), [(True, "cast"), (False, "cpu")])
def test_a_missing_operator_falls_back_by_the_table(
    monkeypatch: pytest.MonkeyPatch, has_fp32: bool, way: str
) -> None:
    real, calls = cases._core, []

    def missing(q: Any, k: Any, v: Any) -> Any:
        calls.append(q.dtype)
        # The first call is the reference's; the last stands for the processor.
        there = q.dtype == torch.float64 or (has_fp32 and q.dtype == torch.float32)
        if not there and len(calls) < 4:
            raise NotImplementedError("'attention' not implemented for 'BFloat16'")
        return real(q, k, v)

    monkeypatch.setattr(cases, "_core", missing)
    (op,) = (op for op in cases.OPERATORS if op.name == "attention")
    found = check._checked(op, "cpu", "bf16", 0)
    assert found.ok and found.fallback == way
    half = [torch.float64, torch.bfloat16, torch.float32, torch.bfloat16]
    assert calls == (half[:3] if has_fp32 else half)


def test_an_operator_that_fails_otherwise_has_no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(q: Any, k: Any, v: Any) -> Any:
        if q.dtype != torch.float64:
            raise RuntimeError("device-side assert")
        return cases.torch.cat([q])

    monkeypatch.setattr(cases, "_core", broken)
    (found,) = (r for r in check.check_all("cpu", "bf16", 0) if r.op == "attention")
    assert not found.ok and found.problem == "device-side assert" and not found.fallback


def test_a_wrong_step_and_losses_that_drift_are_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = Decoder._mlp

    def half(self: Decoder, x: Any, at: str) -> Any:
        return real(self, x, at) * (1.0 if x.dtype == torch.float64 else 0.25)

    monkeypatch.setattr(Decoder, "_mlp", half)
    assert hetlab("--dtype", "fp32", "--align", "3", "--against", "cpu:fp64",
                  "--align-limit", "1e-6") == 5  # fmt: skip
    said = capsys.readouterr().err
    assert "decoder_step in fp32" in said and "losses in fp32 on cpu against cpu:fp64" in said


def test_the_reference_equals_closed_forms() -> None:
    """The fp64 operators that stand as reference, against formulas written another way."""
    by = {op.name: op for op in cases.OPERATORS}
    given = check._inputs(by["attention"], "fp64", 1)
    found, _ = by["attention"].run(given)
    q, k, v = given["q"], given["k"], given["v"]
    for head in (0, 3):
        scores = q[:, 0, head] @ k[:, 0, head // 2].T / q.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, float("-inf"))
        expected = scores.softmax(-1) @ v[:, 0, head // 2]
        torch.testing.assert_close(found[:, 0, head], expected, rtol=1e-12, atol=1e-12)
    x = check._inputs(by["rope"], "fp64", 1)["x"]
    turned, _ = by["rope"].run({"x": x})
    pairs = torch.complex(x[..., :4], x[..., 4:])
    pace = read_config(cases.CONFIG).theta ** -(torch.arange(4, dtype=torch.float64) / 4)
    angle = torch.outer(torch.arange(len(x), dtype=torch.float64), pace)[:, None, None]
    pairs = pairs * torch.polar(torch.ones_like(angle), angle)
    torch.testing.assert_close(turned, torch.cat([pairs.real, pairs.imag], -1), rtol=1e-12,
                               atol=1e-12)  # fmt: skip
    given = check._inputs(by["cross_entropy"], "fp64", 1)
    found, _ = by["cross_entropy"].run(given)
    loss = torch.nn.functional.cross_entropy
    expected = loss(given["logits"], given["targets"], reduction="sum")
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--dtype", "int4"), "--dtype: not a dtype; found int4"),
        (("--against", "cpu:fp16"), "--against: not a dtype of the runtime; found fp16"),
    ],
)
def test_wrong_choices_are_bad_input(
    args: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hetlab(*args) == 4
    assert words in " ".join(capsys.readouterr().err.split())


def test_tolerances_are_those_of_the_source() -> None:
    assert {k: (t.atol, t.rtol) for k, t in TOLERANCES.items()} == {
        "bf16": (1e-2, 1e-3), "fp16": (1e-3, 1e-4), "fp32": (1e-4, 1e-5), "fp64": (1e-4, 1e-5),
    }  # fmt: skip
