"""Recomputation."""

from __future__ import annotations

from strategies.recompute import recompute

__all__ = ["recompute"]
