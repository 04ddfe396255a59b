"""Data axis: replicas, sharded optimizer states."""

from __future__ import annotations

from strategies.data import ddp, delayed, local_sgd, zero

__all__ = ["ddp", "delayed", "local_sgd", "zero"]
