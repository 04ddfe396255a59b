"""Offloading: what lives in host memory, and work that crosses the step boundary."""

from __future__ import annotations

from strategies.offload import autohete, baselines

__all__ = ["autohete", "baselines"]
