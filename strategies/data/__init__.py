"""Data axis: replicas, sharded optimizer states."""

from __future__ import annotations

from strategies.data import ddp, zero

__all__ = ["ddp", "zero"]
