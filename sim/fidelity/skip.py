"""Why a run is not built."""

from __future__ import annotations

__all__ = ["Skip"]


class Skip(Exception):
    """A run lacks a field, or needs a feature that is not there. Its text says which."""
