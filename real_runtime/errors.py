"""What can go wrong while a plan runs."""

from __future__ import annotations

from sim.errors import HetlabError, InputError

__all__ = ["CheckpointError", "RunError", "UnsupportedPlanError"]


class UnsupportedPlanError(InputError):
    """The plan asks for something this runtime does not do; raised before anything starts."""


class RunError(HetlabError):
    """A rank failed, or waited longer than the deadline; says which rank and in which op."""


class CheckpointError(HetlabError):
    """A checkpoint could not be written; says after which step and why."""
