"""Which numbers of a plan's cluster are measured, published or guessed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import msgspec

from sim.plan.plan import Plan
from sim.problem import Problem
from sim.spec.cluster import ClusterDoc
from sim.spec.load import Source, validate
from sim.spec.origins import Origin, Tag, tags
from sim.spec.profiles import NodeDoc

__all__ = ["InputRow", "inputs_of", "kind_of_origin"]

MEASURED = re.compile(r"\bmeasured\b|nccl-tests|perftest|hetlab (probe|calibrate)", re.IGNORECASE)
KINDS = ("measured", "published", "derived", "recalled", "guessed")


class InputRow(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of one profile.

    Args:
        kind: "accelerator", "link", "node" or "model". name: of the profile.
        measured, published: keys whose source says that they were measured, or were found in it.
        derived: worked out from such. recalled: from memory, without a source at hand.
        guessed: assumed, or of a stand-in. stands_in_for: an undisclosed part, or "".
    """

    kind: str
    name: str
    measured: tuple[str, ...] = ()
    published: tuple[str, ...] = ()
    derived: tuple[str, ...] = ()
    recalled: tuple[str, ...] = ()
    guessed: tuple[str, ...] = ()
    stands_in_for: str = ""


def kind_of_origin(tag: Tag) -> str:
    """Return which of ``KINDS`` a number is.

    A number that says nothing of its evidence and has a source counts as found there.
    """
    if tag.evidence in ("assumed", "stand-in"):
        return "guessed"
    if tag.evidence == "remembered":
        return "recalled"
    if MEASURED.search(tag.source):
        return "measured"
    if tag.evidence == "derived":
        return "derived"
    return "published" if tag.source else "guessed"


def inputs_of(plan: Plan, problem: Problem) -> tuple[InputRow, ...]:
    """Return where the numbers come from, of the profiles that a plan's cluster uses.

    Accelerators that hold no rank of the plan are left out, with their nodes and what links these
    alone name; a problem made without documents says nothing.

    Args:
        plan, problem: see there.
    """
    if "cluster" not in problem.documents:
        return ()
    doc = validate(ClusterDoc, Source(problem.documents["cluster"], "problem.cluster"))
    used = {c.accelerator for c in plan.placement.cells}
    rows = [_row(kind, name, origin) for kind, name, origin in _profiles(doc, used)]
    times = len(problem.model.times)
    if times:
        rows.append(
            InputRow(kind="model", name=problem.model.name, measured=(f"{times} times of blocks",))
        )
    return tuple(rows)


def _profiles(doc: ClusterDoc, used: set[str]) -> Iterator[tuple[str, str, Origin]]:
    profiles = doc.profiles
    for a in profiles.accelerators:
        if a.name in used:
            yield "accelerator", a.name, a
    nodes = [n for n in profiles.nodes if not n.accelerator or n.accelerator in used]
    ports = _ports(doc, nodes)
    for link in profiles.links:
        if link.name in ports:
            yield "link", link.name, link
    for node in nodes:
        yield "node", node.name, node


def _ports(doc: ClusterDoc, nodes: Sequence[NodeDoc]) -> set[str]:
    """Link profiles that these nodes, the sites or the cluster name."""
    named = {n.name for n in nodes}
    uses = [u for site in doc.sites for u in site.nodes if not u.profile or u.profile in named]
    ports = [port for n in (*nodes, *uses) for port in (n.fabric, n.nics)]
    ports += [*(site.fabric for site in doc.sites), *doc.links]
    return {port.profile for port in ports if port is not None and port.profile}


def _row(kind: str, name: str, doc: Origin) -> InputRow:
    found: dict[str, list[str]] = {k: [] for k in KINDS}
    for key, tag in tags(doc).items():
        if not key.startswith(("price", "power")):
            found[kind_of_origin(tag)].append(key)
    keys = {k: tuple(v) for k, v in found.items()}
    return InputRow(kind=kind, name=name, stands_in_for=doc.stands_in_for, **keys)
