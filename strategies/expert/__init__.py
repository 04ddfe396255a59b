"""Expert axis."""

from __future__ import annotations

from strategies.expert import balanced, parallel

__all__ = ["balanced", "parallel"]
