"""The cluster document people write: sites, their nodes, and the links between them."""

from __future__ import annotations

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from sim.spec.fields import Count, Doc
from sim.spec.profiles import (
    AcceleratorDoc,
    AcceleratorNumbers,
    LinkDoc,
    LinkRef,
    LinkUse,
    NodeDoc,
    NodeNumbers,
)

__all__ = ["ClusterDoc", "ClusterLinkDoc", "NodesDoc", "ProfilesDoc", "SiteDoc"]


class NodesDoc(NodeNumbers):
    """``count`` equal nodes: a node profile, an inline description, or a profile with overrides.

    Args:
        profile: node profile name, or "" when accelerator and chips are written here.
        count: how many. name: for people.
        island: the fast-connected part they belong to; the nodes of a site that name none share one
            that is called like the site.
    """

    profile: str = ""
    count: Count = Field(default=1, ge=1)
    name: str = ""
    island: str = ""

    @model_validator(mode="after")
    def _something(self) -> NodesDoc:
        if not self.profile and (self.accelerator is None or self.chips is None):
            raise PydanticCustomError(
                "nodes",
                "neither a node profile nor an inline node",
                {"expected": "profile: NAME, or accelerator: NAME and chips: N"},
            )
        return self


class SiteDoc(Doc):
    """One place.

    Args:
        name: unique. nodes: in order.
        fabric: the switch between its nodes; None means no limit beyond their NICs.
    """

    name: str = Field(min_length=1)
    nodes: tuple[NodesDoc, ...] = Field(min_length=1)
    fabric: LinkRef | None = None


class ClusterLinkDoc(LinkUse):
    """A link between two sites or islands.

    Args:
        between: the two names. directed: True when it goes only from the first to the second;
            otherwise one link per direction with the same numbers.
    """

    between: tuple[str, str]
    directed: bool = False

    @model_validator(mode="after")
    def _two_ends(self) -> ClusterLinkDoc:
        if self.between[0] == self.between[1]:
            raise PydanticCustomError(
                "between", "a link from a place to itself", {"expected": "two different names"}
            )
        return self


class ProfilesDoc(Doc):
    """Profiles that travel with the cluster file; they come before the catalogue's."""

    accelerators: tuple[AcceleratorDoc, ...] = ()
    links: tuple[LinkDoc, ...] = ()
    nodes: tuple[NodeDoc, ...] = ()


class ClusterDoc(Doc):
    """What somebody has.

    Args:
        name: for people. sites: at least one; chips are numbered in this order.
        links: between sites or islands. accelerators: accelerator name -> numbers that differ from
            its profile (what-if). profiles: profiles written here instead of in the catalogue.
        assumptions: what had to be assumed, repeated in every report. notes: for people.
    """

    name: str = Field(min_length=1)
    sites: tuple[SiteDoc, ...] = Field(min_length=1)
    links: tuple[ClusterLinkDoc, ...] = ()
    accelerators: dict[str, AcceleratorNumbers] = {}
    profiles: ProfilesDoc = ProfilesDoc()
    assumptions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _names(self) -> ClusterDoc:
        sites = [site.name for site in self.sites]
        if len(set(sites)) != len(sites):
            raise PydanticCustomError(
                "sites", "two sites of one name", {"expected": "unique site names"}
            )
        places = set(sites) | {n.island for s in self.sites for n in s.nodes if n.island}
        for link in self.links:
            for end in link.between:
                if end not in places:
                    raise PydanticCustomError(
                        "between",
                        "a link to the unknown place {end}",
                        {"end": end, "expected": "one of " + ", ".join(sorted(places))},
                    )
        return self
