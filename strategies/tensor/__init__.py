"""Tensor axis: split products, split sequence."""

from __future__ import annotations

from strategies.tensor import megatron, sequence

__all__ = ["megatron", "sequence"]
