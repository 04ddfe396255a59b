"""A cluster document -> the resolved machine.

Chips and nodes are numbered in document order. Every chip has a port out and a port in, every NIC
likewise; what shares a capacity is one ``Link``, so that flows contend on it: the ports of a chip,
the NICs of a node, a site's switch, an island's uplink, a WAN trunk. A half-duplex link is one
``Link`` for both directions.

Between nodes: an island is reached through its site's switch (freely, or over the link written
between the two), and the switch costs ``fabric`` where the site gives one. Nodes that name no
island hang directly on that switch.
"""

from __future__ import annotations

import msgspec

from sim.errors import InputError
from sim.hardware.catalog import Catalog, bundled_catalog
from sim.hardware.machine import Accelerator, Link, Machine, Node
from sim.hardware.resolve import (
    LinkSpec,
    NodeSpec,
    resolve_accelerator,
    resolve_link,
    resolve_node,
)
from sim.hardware.route import Edge, island_routes, route_key
from sim.spec.cluster import ClusterDoc, SiteDoc

__all__ = ["build_machine"]


MAX_PARTS = 400_000
"""Most chips and NICs of a cluster: a file must not be able to exhaust memory."""


class _Draft(msgspec.Struct):
    """A machine while it is built."""

    catalog: Catalog
    nodes: list[Node] = []
    links: list[Link] = []
    accelerators: dict[str, Accelerator] = {}
    edges: list[Edge] = []
    assumptions: dict[str, None] = {}


def build_machine(doc: ClusterDoc, catalog: Catalog | None = None) -> Machine:
    """Resolve a cluster document against the profile catalogue.

    Args:
        doc: what somebody has. catalog: where profiles lie; None means the bundled ones. Profiles
            written in the document come first.

    Returns:
        The machine, in SI.

    Raises:
        InputError: unknown profile; a rate or amount that is not positive; several nodes but none
            of NICs; two sites or islands with no way between them; an override of an accelerator
            that the cluster does not have.
    """
    draft = _Draft(catalog=(catalog or bundled_catalog()).extended(doc.profiles))
    draft.assumptions = dict.fromkeys(doc.assumptions)
    _check_places(doc)
    for s, site in enumerate(doc.sites):
        _add_site(draft, site, s, doc)
    unused = [name for name in doc.accelerators if name not in draft.accelerators]
    if unused:
        raise InputError(
            f"numbers for {unused[0]}, which no node has",
            key=f"accelerators.{unused[0]}",
            expected="one of " + ", ".join(draft.accelerators),
        )
    if len(draft.nodes) > 1:
        for node in draft.nodes:
            if not node.nics:
                raise InputError(
                    f"{node.profile} has no NIC and cannot reach the other nodes",
                    key=f"node {node.index}",
                    expected="nics: with a count of at least 1",
                )
    _join_places(draft, doc)
    islands = tuple(dict.fromkeys(node.island for node in draft.nodes))
    routes = _routes(draft, doc, islands)
    return Machine(
        name=doc.name,
        accelerators=draft.accelerators,
        nodes=tuple(draft.nodes),
        links=tuple(draft.links),
        routes=routes,
        assumptions=tuple(draft.assumptions),
    )


def _check_places(doc: ClusterDoc) -> None:
    """Site and island names say one place each."""
    site_of: dict[str, str] = {site.name: site.name for site in doc.sites}
    for s, site in enumerate(doc.sites):
        for n, nodes in enumerate(site.nodes):
            island = nodes.island or site.name
            if site_of.setdefault(island, site.name) != site.name:
                raise InputError(
                    f"the island {island} is in two sites",
                    key=f"sites.{s}.nodes.{n}.island",
                    found=island,
                    expected="island names that differ between sites and from other sites' names",
                )
    odd = [name for name in site_of if ">" in name]
    if odd:
        raise InputError("a place name with >", key="sites", found=odd[0])


def _add_site(draft: _Draft, site: SiteDoc, index: int, doc: ClusterDoc) -> None:
    for n, nodes in enumerate(site.nodes):
        where = f"sites.{index}.nodes.{n}"
        spec = resolve_node(nodes, nodes.profile, draft.catalog, where)
        if spec.accelerator not in draft.accelerators:
            changes = doc.accelerators.get(spec.accelerator)
            found, assumed = resolve_accelerator(spec.accelerator, changes, draft.catalog)
            draft.accelerators[found.name] = found
            draft.assumptions |= dict.fromkeys(assumed)
        draft.assumptions |= dict.fromkeys(spec.guesses)
        parts = nodes.count * (spec.chips + spec.nics)
        if parts + len(draft.links) > MAX_PARTS:
            raise InputError(
                "the cluster is too large to be laid out",
                key=f"{where}.count",
                found=f"{nodes.count} nodes of {spec.chips} chips and {spec.nics} NICs",
                expected=f"at most {MAX_PARTS:,} chips and NICs in all",
            )
        for _ in range(nodes.count):
            _add_node(draft, spec, site.name, nodes.island or site.name)


def _add_node(draft: _Draft, spec: NodeSpec, site: str, island: str) -> None:
    index = len(draft.nodes)
    first = draft.nodes[-1].chips[1] if draft.nodes else 0
    ports = []
    if spec.fabric is not None:
        for chip in range(spec.chips):
            ports.append(_two_way(draft, f"node{index}/chip{chip}", spec.fabric))
    nics = []
    if spec.nic is not None:
        for nic in range(spec.nics):
            nics.append(_two_way(draft, f"node{index}/nic{nic}", spec.nic))
    port, card = spec.fabric or LinkSpec(rate=0.0), spec.nic or LinkSpec(rate=0.0)
    draft.nodes.append(
        Node(
            index=index,
            profile=spec.profile,
            site=site,
            island=island,
            accelerator=spec.accelerator,
            chips=(first, first + spec.chips),
            fabric_rate=port.rate,
            fabric_latency=port.latency,
            fabric_curve=port.curve,
            nics=spec.nics,
            nic_rate=card.rate,
            nic_latency=card.latency,
            nic_curve=card.curve,
            chip_nic=spec.chip_nic,
            nonaffine_rate=spec.nonaffine_rate,
            host_memory_bytes=spec.host_memory_bytes,
            pcie_rate=spec.pcie_rate,
            host=spec.host,
            chip_links=tuple(ports),
            nic_links=tuple(nics),
        )
    )


def _two_way(draft: _Draft, name: str, spec: LinkSpec) -> tuple[int, int]:
    """Add a port; returns its (out, in) links, one and the same if it is half duplex."""
    if spec.half_duplex:
        both = _add_link(draft, name, spec)
        return both, both
    return _add_link(draft, f"{name}/out", spec), _add_link(draft, f"{name}/in", spec)


def _add_link(draft: _Draft, name: str, spec: LinkSpec) -> int:
    draft.links.append(
        Link(
            name=name,
            rate=spec.rate,
            latency=spec.latency,
            curve=spec.curve,
            flow_cap=spec.flow_cap,
            price_per_byte=spec.price_per_byte,
            kind=spec.kind,
            collectives=spec.collectives,
        )
    )
    return len(draft.links) - 1


def _join_places(draft: _Draft, doc: ClusterDoc) -> None:
    """Add switches, uplinks, trunks and WAN links, and the edges routes are found on.

    A site is two vertices, its switch's way in and way out; an island is one.
    """
    sites = {site.name for site in doc.sites}
    home = {node.island: node.site for node in draft.nodes if node.island not in sites}
    for s, site in enumerate(doc.sites):
        index = None
        if site.fabric is not None:
            spec = resolve_link(site.fabric, "uplink", draft.catalog, f"sites.{s}.fabric")
            draft.assumptions |= dict.fromkeys(spec.guesses)
            index = _add_link(draft, f"{site.name}/switch", spec)
        draft.edges.append((f"{site.name}>in", f"{site.name}>out", index))
    joined: set[tuple[str, str]] = set()
    for n, use in enumerate(doc.links):
        start, end = use.between
        role = "wan" if start in sites and end in sites else "uplink"
        spec = resolve_link(use, role, draft.catalog, f"links.{n}", f"{start} - {end}")
        draft.assumptions |= dict.fromkeys(spec.guesses)
        pairs = [(start, end)] if use.directed else [(start, end), (end, start)]
        index = None
        for a, b in pairs:
            if (a, b) in joined:
                raise InputError(
                    f"two links from {a} to {b}; routes use one",
                    key=f"links.{n}.between",
                    expected="one link with the rates added up",
                )
            joined.add((a, b))
            if index is None or not spec.half_duplex:
                name = f"{a}<->{b}" if spec.half_duplex and not use.directed else f"{a}->{b}"
                index = _add_link(draft, name, spec)
            leave, enter = f"{a}>out" if a in sites else a, f"{b}>in" if b in sites else b
            draft.edges.append((leave, enter, index))
    for island, site_name in home.items():
        if (island, site_name) not in joined and (site_name, island) not in joined:
            draft.edges.append((island, f"{site_name}>in", None))
            draft.edges.append((f"{site_name}>out", island, None))


def _routes(draft: _Draft, doc: ClusterDoc, islands: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """Routes of every ordered pair of islands; refuses places with no way between them."""
    sites = {site.name for site in doc.sites}
    leave = {i: f"{i}>in" if i in sites else i for i in islands}
    enter = {i: f"{i}>out" if i in sites else i for i in islands}
    routes = island_routes(leave, enter, draft.edges, draft.links)
    home = {node.island: node.site for node in draft.nodes}
    for a in islands:
        lost = [b for b in islands if route_key(a, b) not in routes]
        if lost:
            names = [home[b] if home[b] != home[a] else b for b in lost]
            start = home[a] if home[a] != home[lost[0]] else a
            what = "sites" if home[a] != home[lost[0]] else "islands"
            raise InputError(
                f"disconnected {what}: no link leads from {start} to "
                + ", ".join(dict.fromkeys(names)),
                key="links",
                expected=f"a link with between: [{start}, {names[0]}]",
            )
    return routes
