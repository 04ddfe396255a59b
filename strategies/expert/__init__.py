"""Expert axis."""

from __future__ import annotations

from strategies.expert import parallel

__all__ = ["parallel"]
