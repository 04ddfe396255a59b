"""Pipeline axis: schedules, the cut of the model into stages, and unlike stages."""

from __future__ import annotations

from strategies.pipeline import hetero, partition, schedules

__all__ = ["hetero", "partition", "schedules"]
