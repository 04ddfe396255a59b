"""Measured times of a model's blocks, which replace the roofline where there is an entry."""

from __future__ import annotations

from sim.errors import InputError
from sim.model.graph import Block, MeasuredTime, Model

__all__ = ["MeasuredTimes"]


class MeasuredTimes:
    """Measured times of a model by (block, accelerator), then (tp, microbatch)."""

    def __init__(self, model: Model) -> None:
        self.entries: dict[tuple[str, str], dict[tuple[int, int], MeasuredTime]] = {}
        for t in model.times:
            self.entries.setdefault((t.block, t.accelerator), {})[t.tp, t.microbatch] = t

    def find(
        self, block: Block, accelerator: str, tp: int, microbatch: float, cp: int = 1
    ) -> MeasuredTime | None:
        """Return the entry for this block, or None when none was measured on this accelerator.

        Args:
            block: what. accelerator: profile name. tp, cp: sizes. microbatch: [sequences].

        Raises:
            InputError: the block was measured on it, but not at this tp, microbatch or cp, or it
                can only be measured and was not; names the nearest entries.
        """
        known = self.entries.get((block.name, accelerator))
        where = f"{block.name} on {accelerator}"
        if known is None:
            if block.kind != "measured":
                return None
            others = sorted({a for b, a in self.entries if b == block.name})
            raise InputError(
                f"no measured time of {where}",
                key="model.times",
                found=accelerator,
                expected=" or ".join(others) or "an entry for this block",
            )
        hit = known.get((tp, int(microbatch))) if microbatch == int(microbatch) else None
        if hit is not None and cp == 1:
            return hit
        near = sorted(
            known, key=lambda e: (abs(e[0] - tp) / tp + abs(e[1] - microbatch) / microbatch, e)
        )
        asked = f"tp {tp}, microbatch {microbatch:g}"
        raise InputError(
            f"no measured time of {where} at this split",
            key="model.times",
            found=asked + (f", cp {cp}" if cp > 1 else ""),
            expected=" or ".join(f"tp {t}, microbatch {m}" for t, m in near[:3]),
        )
