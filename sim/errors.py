"""What can go wrong, as exceptions.

    HetlabError                 exit 1, base of everything hetlab raises on purpose
    |- InputError               exit 4, a file or value a person gave is wrong
    |  `- PlanError             exit 4, a plan breaks a rule of the plan format
    |- UsageError               exit 2, options that contradict one another
    |- InfeasibleError          exit 3, nothing fits; names the binding constraint
    |- ThresholdError           exit 5, a --fail-if condition holds
    |- StoppedError             exit 130, interrupted before there was a result
    `- SimulationError          exit 1, the engine could not finish a run

Every class is constructible from its positional ``args`` alone, because SimPy re-raises a failed
event by rebuilding the exception that way.
"""

from __future__ import annotations

__all__ = [
    "HetlabError",
    "InfeasibleError",
    "InputError",
    "PlanError",
    "SimulationError",
    "StoppedError",
    "ThresholdError",
    "UsageError",
]


class HetlabError(Exception):
    """Base of all errors raised on purpose; ``exit_code`` is what the command returns."""

    exit_code = 1


class InputError(HetlabError):
    """A document is wrong: says where, what was found and what was expected.

    Args:
        message: one sentence for people.
        file: path of the document, or "" when the value did not come from a file.
        line: 1-based line, 0 when unknown.
        key: dotted path of the value in the document.
        found: the offending value as written.
        expected: what would have been accepted.
    """

    exit_code = 4

    def __init__(
        self,
        message: str,
        file: str = "",
        line: int = 0,
        key: str = "",
        found: str = "",
        expected: str = "",
    ) -> None:
        super().__init__(message, file, line, key, found, expected)
        self.message, self.file, self.line, self.key = message, file, line, key
        self.found, self.expected = found, expected

    def __str__(self) -> str:
        where = ":".join(p for p in (self.file, str(self.line) if self.line else "", self.key) if p)
        text = f"{where}: {self.message}" if where else self.message
        if self.found:
            text += f"; found {self.found}"
        if self.expected:
            text += f"; expected {self.expected}"
        return text


class PlanError(InputError):
    """A plan breaks a rule of the plan format (see sim.plan.validate)."""


class UsageError(HetlabError):
    """Options or arguments that contradict one another."""

    exit_code = 2


class InfeasibleError(HetlabError):
    """No plan satisfies the limits.

    Args:
        message: what is impossible.
        binding: the constraint that bound it, e.g. "memory of stage 0 on T4".
    """

    exit_code = 3

    def __init__(self, message: str, binding: str = "") -> None:
        super().__init__(message, binding)
        self.message, self.binding = message, binding

    def __str__(self) -> str:
        return f"{self.message} (bound by {self.binding})" if self.binding else self.message


class ThresholdError(HetlabError):
    """A ``--fail-if`` condition holds."""

    exit_code = 5


class StoppedError(HetlabError):
    """Interrupted before there was a result."""

    exit_code = 130


class SimulationError(HetlabError):
    """The engine could not finish a run, e.g. because a chip was lost."""
