"""Everything wrong with a cluster document, and what its nodes take over from their profiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from sim.errors import InputError
from sim.hardware.build import build_machine
from sim.hardware.catalog import Catalog
from sim.hardware.resolve import resolve_accelerator, resolve_link, resolve_node
from sim.spec.cluster import ClusterDoc, NodesDoc
from sim.spec.load import Source
from sim.spec.problems import in_file_order
from sim.spec.profiles import LinkUse

__all__ = ["inherit_ports", "machine_problems"]


def machine_problems(doc: ClusterDoc, source: Source, catalog: Catalog) -> list[InputError]:
    """Find all that ``build_machine`` would refuse, each with file, line and key.

    Profiles, accelerators and links are tried one by one; what only the whole shows (islands
    without a way between them) is looked for when each part is sound.

    Args:
        doc: a valid document. source: what it was read from. catalog: where profiles lie.
    """
    found: list[InputError] = []

    def attempt(key: str, work: Callable[[], object]) -> None:
        try:
            work()
        except InputError as error:
            found.append(_located(error, key, source))

    attempt("profiles.accelerators", lambda: catalog.extended(doc.profiles))
    if found:
        return found
    known = catalog.extended(doc.profiles)
    for s, site in enumerate(doc.sites):
        for n, nodes in enumerate(site.nodes):
            for key, work in _of_node(doc, nodes, f"sites.{s}.nodes.{n}", known):
                attempt(key, work)
        if site.fabric is not None:
            attempt(f"sites.{s}.fabric", _link(site.fabric, f"sites.{s}.fabric", known))
    for i, link in enumerate(doc.links):
        attempt(f"links.{i}", _link(link, f"links.{i}", known))
    if not found:
        attempt("", lambda: build_machine(doc, catalog))
    return in_file_order(found)


Attempt = tuple[str, Callable[[], object]]


def _of_node(doc: ClusterDoc, nodes: NodesDoc, where: str, known: Catalog) -> list[Attempt]:
    """What to try of one node entry: (key to blame, the attempt)."""
    accelerator, blame = nodes.accelerator, f"{where}.accelerator"
    if nodes.profile:
        try:
            base = known.node(nodes.profile)
        except InputError:
            return [(f"{where}.profile", lambda: known.node(nodes.profile))]
        if accelerator is None:
            own = [i for i, p in enumerate(doc.profiles.nodes) if p.name == nodes.profile]
            accelerator = base.accelerator
            blame = f"profiles.nodes.{own[0]}.accelerator" if own else f"{where}.profile"
    name = accelerator or ""
    try:
        known.accelerator(name)
    except InputError:
        return [(blame, lambda: known.accelerator(name))]
    changes = doc.accelerators.get(name)
    inline = [i for i, p in enumerate(doc.profiles.accelerators) if p.name == name]
    if changes is not None:
        blame = f"accelerators.{name}"
    elif inline:
        blame = f"profiles.accelerators.{inline[0]}"
    return [
        (blame, lambda: resolve_accelerator(name, changes, known)),
        (where, lambda: resolve_node(nodes, nodes.profile, known, where)),
    ]


def _link(use: LinkUse, where: str, known: Catalog) -> Callable[[], object]:
    return lambda: resolve_link(use, "uplink", known, where)


def _located(error: InputError, blame: str, source: Source) -> InputError:
    """Give an error the file and line of its key, or of the key to blame."""
    if error.file:
        return error
    key = _key(error.key)
    if blame and not error.key.startswith(blame):
        # The catalogue knows the kind of a missing profile, an accelerator the number's own key.
        below = _key(f"{blame}.{error.key}")
        key = below if below in source.lines else _key(blame)
    file, line = source.where(key)
    return InputError(
        error.message, file, line, ".".join(map(str, key)), error.found, error.expected
    )


def _key(dotted: str) -> tuple[str | int, ...]:
    return tuple(int(p) if p.isdigit() else p for p in dotted.split(".")) if dotted else ()


def inherit_ports(source: Source, catalog: Catalog) -> Source:
    """Let ``nics: {count: 2}`` beside a node profile change that profile's NICs, ``fabric`` too.

    Such an entry names neither a profile nor a rate, so it can only mean what the node has. A NIC
    affinity is not taken over when the number of NICs changes.

    Args:
        source: of a cluster, left unchanged; what is not well formed is left to validation.
        catalog: where node profiles lie that the document does not define itself.
    """
    data = source.data
    for s, site in enumerate(_entries(data.get("sites"))):
        for n, nodes in enumerate(_entries(site.get("nodes"))):
            for port in ("nics", "fabric"):
                own = nodes.get(port)
                if not isinstance(own, dict) or "profile" in own or "rate" in own:
                    continue
                base = _port_of(data, nodes.get("profile"), port, catalog)
                if base and own.get("count", base.get("count", 1)) != base.get("count", 1):
                    base.pop("affinity", None)
                if base:
                    data = _replaced(data, ("sites", s, "nodes", n, port), base | own)
    return msgspec.structs.replace(source, data=data)


def _entries(value: Any) -> list[dict[str, Any]]:
    """The list with {} for what is no mapping; [] for what is no list."""
    return [v if isinstance(v, dict) else {} for v in value] if isinstance(value, list) else []


def _port_of(data: Any, profile: Any, port: str, catalog: Catalog) -> dict[str, Any]:
    """The port of a node profile as plain data, {} where there is none."""
    profiles = data.get("profiles")
    for own in _entries(profiles.get("nodes") if isinstance(profiles, dict) else None):
        if own.get("name") == profile:
            given = own.get(port) or {}
            return {"profile": given} if isinstance(given, str) else dict(given)
    if not isinstance(profile, str) or profile not in catalog.names("nodes"):
        return {}
    use = getattr(catalog.node(profile), port)
    found: dict[str, Any] = use.model_dump(mode="json", exclude_defaults=True) if use else {}
    return found


def _replaced(data: Any, path: tuple[str | int, ...], value: Any) -> Any:
    """A copy of nested plain data with one value replaced."""
    if not path:
        return value
    copy: Any = dict(data) if isinstance(data, dict) else list(data)
    copy[path[0]] = _replaced(data[path[0]], path[1:], value)
    return copy
