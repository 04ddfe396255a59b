"""Run an operator on a device and hold it against the same inputs in float64 on the processor."""

from __future__ import annotations

import math

import torch

from real_runtime.ops.cases import OPERATORS, Operator, Tensors
from real_runtime.ops.records import FALLBACKS, TOLERANCES, OpResult, Worst

__all__ = ["DTYPES", "check_all", "compared", "devices"]

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
UPSTREAM = 0.05
"""Standard deviation of the gradients that arrive from above."""
MISSING = ("not implemented", "not supported", "unsupported", "doesn't support", "no kernel")


def devices() -> tuple[str, ...]:
    """Return the devices of this process: the processor, and the accelerator when there is one."""
    found = ["cpu"]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        found.append(kind.type)
    return tuple(found)


def check_all(device: str, dtype: str, seed: int) -> list[OpResult]:
    """Check every operator.

    Args:
        device: type of it. dtype: of ``DTYPES``. seed: of the inputs.
    """
    return [_checked(op, device, dtype, seed) for op in OPERATORS]


def _checked(op: Operator, device: str, dtype: str, seed: int) -> OpResult:
    inputs = _inputs(op, dtype, seed)
    expected = _run(op, inputs, "cpu", torch.float64, seed, dtype)
    said = ""
    for way in ("", *FALLBACKS[op.name]):
        at = "cpu" if way == "cpu" else device
        used = torch.float32 if way == "cast" else DTYPES[dtype]
        try:
            found = _run(op, inputs, at, used, seed, dtype)
        except (RuntimeError, TypeError) as error:
            said = said or str(error).strip().splitlines()[0]
            if not _is_missing(error):
                break
            continue
        return compared(op.name, device, dtype, found, expected, way)
    return OpResult(op=op.name, device=device, dtype=dtype, ok=False, problem=said)


def _is_missing(error: Exception) -> bool:
    text = str(error).lower()
    return isinstance(error, NotImplementedError) or any(words in text for words in MISSING)


def _inputs(op: Operator, dtype: str, seed: int) -> Tensors:
    """Inputs in fp64, already rounded to the dtype: what is compared is the operator alone."""
    source = torch.Generator().manual_seed(seed)
    found: Tensors = {}
    for name, (scale, shape) in op.inputs.items():
        if name in ("ids", "targets"):
            found[name] = torch.randint(int(scale), shape, generator=source)
        else:
            values = torch.randn(shape, generator=source, dtype=torch.float64) * scale
            found[name] = values.to(DTYPES[dtype]).double()
    return found


def _run(
    op: Operator, inputs: Tensors, device: str, used: torch.dtype, seed: int, dtype: str
) -> Tensors:
    """Outputs and gradients of one operator, in fp64 on the processor."""
    given = {
        name: x.to(device, used).clone().requires_grad_() if x.is_floating_point() else x.to(device)
        for name, x in inputs.items()
    }
    output, kept = op.run(given)
    found = {"output": output}
    if output.requires_grad:
        source = torch.Generator().manual_seed(seed + 1)
        above = torch.randn(output.shape, generator=source, dtype=torch.float64) * UPSTREAM
        output.backward(above.to(DTYPES[dtype]).to(device, output.dtype))
        leaves = {n: x.grad for n, x in given.items() if x.grad is not None}
        found |= {f"gradient of {n}": g for n, g in (leaves | kept).items()}
    return {name: x.detach().to("cpu").double() for name, x in found.items()}


def compared(
    op: str, device: str, dtype: str, found: Tensors, expected: Tensors, fallback: str = ""
) -> OpResult:
    """Hold tensors against their reference.

    Args:
        op, device, dtype: what was computed. found, expected: by name, in fp64 on the processor.
        fallback: what stood in.
    """
    allowed = TOLERANCES[dtype]
    off = size = 0.0
    worst, most = None, -1.0
    for name, reference in expected.items():
        gap = (found[name] - reference).abs()
        off, size = off + float(gap.sum()), size + float(reference.abs().sum())
        share = (gap / (allowed.atol + allowed.rtol * reference.abs())).nan_to_num(
            nan=math.inf, posinf=math.inf
        )
        at = int(share.argmax())
        highest = float(share.flatten()[at])
        if highest > most:
            index = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), reference.shape))
            most = highest
            worst = Worst(
                tensor=name, shape=tuple(reference.shape), index=index,
                found=_finite(float(found[name].flatten()[at])),
                reference=_finite(float(reference.flatten()[at])), allowed_share=_finite(highest),
            )  # fmt: skip
    return OpResult(
        op=op, device=device, dtype=dtype, ok=most <= 1.0, worst=worst, fallback=fallback,
        mean_relative_error=_finite(off / size) if size else None,
    )  # fmt: skip


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
