"""What ``hetlab doctor ops`` checks with, and what it finds. Imports no torch."""

from __future__ import annotations

import msgspec

__all__ = [
    "ALIGN_LIMIT",
    "FALLBACKS",
    "TOLERANCES",
    "Alignment",
    "OpResult",
    "OpsDocument",
    "Tolerance",
    "Worst",
]


class Tolerance(msgspec.Struct, frozen=True):
    """|found - reference| <= atol + rtol |reference|, in every element."""

    atol: float
    rtol: float


TOLERANCES = {
    "bf16": Tolerance(1e-2, 1e-3),
    "fp16": Tolerance(1e-3, 1e-4),
    "fp32": Tolerance(1e-4, 1e-5),
    "fp64": Tolerance(1e-4, 1e-5),
}
"""Those of DiTorch's operator check (github.com/DeepLink-org/ditorch, README), the tool beside H2
(arXiv 2505.17548). Absolute terms suit values near 1, so the cases keep theirs there."""

FALLBACKS: dict[str, tuple[str, ...]] = {
    "matmul": ("cast", "cpu"),
    "rmsnorm": ("cast", "cpu"),
    "rope": ("cast", "cpu"),
    "attention": ("cast", "cpu"),
    "swiglu": ("cast", "cpu"),
    "embedding": ("cpu",),
    "cross_entropy": ("cast", "cpu"),
    "adamw": ("cpu",),
    "reductions": ("cast", "cpu"),
}
"""What stands in for an operator that a device does not have in a dtype, tried in order: "cast"
computes in fp32 on the device, "cpu" in the dtype on the processor."""

ALIGN_LIMIT = 0.015
"""Mean relative difference of losses up to which two runs count as aligned; hetlab's own choice."""


class Worst(msgspec.Struct, frozen=True, kw_only=True):
    """The element farthest outside, or nearest to, its tolerance.

    Args:
        tensor: "output", or "gradient of" an input. shape: of the tensor. index: in it.
        found, reference: its values, None where not finite. allowed_share: |found - reference| over
            the tolerance, None where not finite.
    """

    tensor: str
    shape: tuple[int, ...]
    index: tuple[int, ...]
    found: float | None
    reference: float | None
    allowed_share: float | None


class OpResult(msgspec.Struct, frozen=True, kw_only=True):
    """One operator in one dtype on one device, forward and backward.

    Args:
        op, device, dtype: what. ok: all elements within the tolerance.
        mean_relative_error: sum |found - reference| / sum |reference|, None without a finite value.
        worst: element. fallback: what stood in for a missing operator, "" for none.
        problem: why there is no result, "" when there is one.
    """

    op: str
    device: str
    dtype: str
    ok: bool
    mean_relative_error: float | None = None
    worst: Worst | None = None
    fallback: str = ""
    problem: str = ""


class Alignment(msgspec.Struct, frozen=True, kw_only=True):
    """Losses of one run beside another's.

    Args:
        device, dtype, against: the two runs, the second as "device:dtype". steps: of both.
        mean_relative_error: mean over steps of |loss - reference| / reference; None: not finite.
        limit: what it may be. ok: whether it is. losses, reference: per step.
    """

    device: str
    dtype: str
    against: str
    steps: int
    mean_relative_error: float | None
    limit: float
    ok: bool
    losses: tuple[float, ...]
    reference: tuple[float, ...]


class OpsDocument(msgspec.Struct, frozen=True, kw_only=True):
    """All that was found.

    Args:
        torch: its version. reference: what everything is compared with. seed: of the inputs.
        tolerances: dtype -> tolerance. results, alignment: in order. skipped: what was not checked.
    """

    torch: str
    reference: str
    seed: int
    tolerances: dict[str, Tolerance]
    results: tuple[OpResult, ...]
    alignment: tuple[Alignment, ...] = ()
    skipped: tuple[str, ...] = ()

    @property
    def off(self) -> tuple[str, ...]:
        """Names of what is not as it should be."""
        found = [f"{r.op} in {r.dtype} on {r.device}" for r in self.results if not r.ok]
        found += [
            f"losses in {a.dtype} on {a.device} against {a.against}"
            for a in self.alignment
            if not a.ok
        ]
        return tuple(found)
