"""Where a job's tokens are routed, for models with experts."""

from __future__ import annotations

import msgspec
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from sim.spec.fields import Doc

__all__ = ["Routed", "RoutingDoc", "routed_from_doc"]


class RoutingDoc(Doc):
    """Where tokens are routed, for models with experts: a trace, or how uneven draws are.

    Args:
        trace: file of counts, see strategies.expert.routing_files; nothing else stands beside it.
        sigma, zipf, phi, step, first_layer, concentration: of draws from the run's seed, see
            strategies.expert.routing_synthetic.Popularity.
    """

    trace: str | None = None
    sigma: float | None = Field(default=None, ge=0, le=10)
    zipf: float | None = Field(default=None, ge=0, le=10)
    phi: float | None = Field(default=None, ge=0, le=1)
    step: float | None = Field(default=None, ge=0, le=10)
    first_layer: float | None = Field(default=None, ge=0, le=1000)
    concentration: float | None = Field(default=None, ge=0.1)

    @model_validator(mode="after")
    def _one_origin(self) -> RoutingDoc:
        drawn = [
            n for n in RoutingDoc.model_fields if n != "trace" and getattr(self, n) is not None
        ]
        if not self.trace and not drawn:
            raise PydanticCustomError(
                "routing", "routing is a trace or a draw", {"expected": "trace, sigma or zipf"}
            )
        if (self.trace and drawn) or (self.sigma and self.zipf):
            both = "trace" if self.trace else "sigma"
            raise PydanticCustomError(
                "routing",
                "{both} stands alone, and {other} beside it says otherwise",
                {"both": both, "other": drawn[-1] if self.trace else "zipf", "expected": "one"},
            )
        return self


class Routed(msgspec.Struct, frozen=True, kw_only=True):
    """Where tokens are routed, see ``RoutingDoc``.

    Args:
        trace: file, "" for draws. numbers: of the draws, by name.
    """

    trace: str = ""
    numbers: dict[str, float] = {}


def routed_from_doc(doc: RoutingDoc | None) -> Routed | None:
    """Resolve the document; None where a job has none."""
    if doc is None:
        return None
    given = {name: getattr(doc, name) for name in RoutingDoc.model_fields if name != "trace"}
    numbers = {name: value for name, value in given.items() if value is not None}
    return Routed(trace=doc.trace or "", numbers=numbers)
