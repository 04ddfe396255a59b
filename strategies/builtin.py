"""The built-in strategies: importing this module registers all of them."""

from __future__ import annotations

from strategies import data, expert, offload, pipeline, recompute, tensor

__all__ = ["data", "expert", "offload", "pipeline", "recompute", "tensor"]
