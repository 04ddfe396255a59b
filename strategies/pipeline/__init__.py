"""Pipeline axis: schedules, and the cut of the model into stages."""

from __future__ import annotations

from strategies.pipeline import partition, schedules

__all__ = ["partition", "schedules"]
