"""Op kinds of offloading: parameters that live on the host are fetched for one pass."""

from __future__ import annotations

from sim.plan.kinds import Kind, register

__all__ = ["FETCH_B", "FETCH_F"]

FETCH_F = register(Kind(name="FETCH_F", stream="h2d", cost="host", memory="gather"))
"""Parameters of a segment come in for a forward pass."""
FETCH_B = register(Kind(name="FETCH_B", stream="h2d", cost="host", memory="gather"))
"""Parameters of a segment come in for a backward pass."""
