"""Find profiles by name: the cluster file's own, then user directories, then the bundled ones."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal, TypeVar

import hardware_profiles
from sim.errors import InputError
from sim.spec.cluster import ClusterDoc, ProfilesDoc
from sim.spec.load import read_source, validate
from sim.spec.origins import Origin
from sim.spec.profiles import AcceleratorDoc, AcceleratorNumbers, LinkDoc, NodeDoc, ProcessorDoc

__all__ = ["Catalog", "DefaultsDoc", "ProfileKind", "bundled_catalog", "bundled_directory"]

ProfileKind = Literal["accelerators", "links", "hosts", "nodes", "clusters"]
NamedDoc = AcceleratorDoc | LinkDoc | ProcessorDoc | NodeDoc | ClusterDoc
D = TypeVar("D", AcceleratorDoc, LinkDoc, ProcessorDoc, NodeDoc, ClusterDoc)

_MOST_NAMES, _NEAR_NAMES = 24, 8
"""Names up to which a message lists them all, and how many it lists of more."""
_SPARSE = 1.9
"""A peak this many times the bundled dense one is the figure with structured sparsity (2x)."""


class DefaultsDoc(Origin, AcceleratorNumbers):
    """Numbers used where an accelerator profile has none (hardware_profiles/defaults.yaml)."""


def bundled_directory() -> Path:
    """Return the directory of the profiles that come with hetlab."""
    return Path(str(hardware_profiles.folder()))


class Catalog:
    """Profiles by kind and name; every file is read at most once.

    A directory holds ``accelerators/``, ``links/``, ``hosts/``, ``nodes/`` and ``clusters/``, each
    with one file ``NAME.yaml`` per profile; the profile's ``name`` equals the file's.

    Args:
        directories: the user's own, searched in this order before the bundled one.
    """

    def __init__(self, directories: Sequence[str | Path] = ()) -> None:
        self._roots = (*(Path(d) for d in directories), bundled_directory())
        for root in self._roots:
            if not root.is_dir():
                raise InputError("no such directory of profiles", file=str(root))
        self._cache: dict[tuple[str, str], NamedDoc] = {}
        self._inline: ProfilesDoc = ProfilesDoc()
        self._defaults: DefaultsDoc | None = None

    def extended(self, profiles: ProfilesDoc) -> Catalog:
        """Return a catalogue in which a cluster file's own profiles come first."""
        other = Catalog(self._roots[:-1])
        other._cache = self._cache
        other._defaults = self.defaults()
        other._inline = profiles
        for own in profiles.accelerators:
            self._refuse_sparse(own, f"profiles.accelerators ({own.name})")
        return other

    def names(self, kind: ProfileKind) -> tuple[str, ...]:
        """Return the names of all profiles of a kind, sorted."""
        found = {p.stem for root in self._roots for p in (root / kind).glob("*.yaml")}
        return tuple(sorted(found | {doc.name for doc in self._own(kind)}))

    def accelerator(self, name: str) -> AcceleratorDoc:
        """Return an accelerator profile. Raises InputError: unknown name, wrong file."""
        return self._get(AcceleratorDoc, "accelerators", name)

    def link(self, name: str) -> LinkDoc:
        """Return a link profile. Raises InputError: unknown name, wrong file."""
        return self._get(LinkDoc, "links", name)

    def host(self, name: str) -> ProcessorDoc:
        """Return a processor type. Raises InputError: unknown name, wrong file."""
        return self._get(ProcessorDoc, "hosts", name)

    def node(self, name: str) -> NodeDoc:
        """Return a node profile. Raises InputError: unknown name, wrong file."""
        return self._get(NodeDoc, "nodes", name)

    def cluster(self, name: str) -> ClusterDoc:
        """Return a cluster of the catalogue. Raises InputError: unknown name, wrong file."""
        return self._get(ClusterDoc, "clusters", name)

    def file(self, kind: ProfileKind, name: str) -> Path:
        """Return the file of a profile. Raises InputError: unknown name."""
        # Compared with the listing, not joined to a path: a name cannot lead out of the directory.
        for root in self._roots:
            file = next((p for p in (root / kind).glob("*.yaml") if p.stem == name), None)
            if file is not None:
                return file
        raise self._unknown(kind, name)

    def defaults(self) -> DefaultsDoc:
        """Return the numbers that stand in for what a profile does not give."""
        if self._defaults is None:
            path = next(p for r in self._roots if (p := r / "defaults.yaml").is_file())
            self._defaults = validate(DefaultsDoc, read_source(path))
        return self._defaults

    def _own(self, kind: ProfileKind) -> Iterable[AcceleratorDoc | LinkDoc | NodeDoc]:
        if kind == "accelerators":
            return self._inline.accelerators
        if kind == "links":
            return self._inline.links
        return self._inline.nodes if kind == "nodes" else ()

    def _get(self, doc_type: type[D], kind: ProfileKind, name: str) -> D:
        for own in self._own(kind):
            if own.name == name and isinstance(own, doc_type):
                return own
        cached = self._cache.get((kind, name))
        if isinstance(cached, doc_type):
            return cached
        doc = self._read(doc_type, kind, name)
        self._cache[kind, name] = doc
        return doc

    def _read(self, doc_type: type[D], kind: ProfileKind, name: str) -> D:
        file = self.file(kind, name)
        source = read_source(file)
        doc = validate(doc_type, source)
        if doc.name != name:
            raise InputError(
                "a profile is named like its file",
                file=str(file),
                line=source.line(("name",)),
                key="name",
                found=doc.name,
                expected=name,
            )
        if isinstance(doc, AcceleratorDoc) and file.parent.parent != self._roots[-1]:
            self._refuse_sparse(doc, str(file))
        return doc

    def _refuse_sparse(self, doc: AcceleratorDoc, where: str) -> None:
        """Refuse a user's profile of a bundled accelerator whose peak is the sparse figure."""
        if not (self._roots[-1] / "accelerators" / f"{Path(doc.name).name}.yaml").is_file():
            return
        bundled = Catalog().accelerator(Path(doc.name).name)
        for dtype, peak in doc.peaks.items():
            dense = bundled.peaks.get(dtype)
            if dense is not None and peak.value >= _SPARSE * dense.value:
                raise InputError(
                    "this peak counts structured sparsity; peaks are dense peaks",
                    file=where,
                    key=f"peaks.{dtype}",
                    found=f"{peak.value / 1e12:g} TFLOP/s",
                    expected=f"about {dense.value / 1e12:g} TFLOP/s",
                )

    def _unknown(self, kind: ProfileKind, name: str) -> InputError:
        names = self.names(kind)
        lowered = {n.lower(): n for n in names}
        asked = name.lower()
        close = [n for low, n in lowered.items() if asked and low.startswith(asked)]
        close += [
            lowered[low] for low in difflib.get_close_matches(asked, lowered, n=3, cutoff=0.5)
        ]
        close += [n for low, n in lowered.items() if asked and asked in low]
        close = list(dict.fromkeys(close))
        shown = ", ".join(names)
        if len(names) > _MOST_NAMES:
            near = difflib.get_close_matches(asked, lowered, n=_NEAR_NAMES, cutoff=0.0)
            some = ", ".join(lowered[low] for low in near)
            shown = f"{some} ... ({len(names)} in all: hetlab profiles list {kind})"
        own = "" if kind in ("clusters", "hosts") else f", or define it under profiles.{kind}"
        hint = f"; did you mean {' or '.join(close[:3])}?" if close else ""
        return InputError(
            f"no profile {name} among the {kind}{hint}",
            key=kind,
            found=name,
            expected=f"one of {shown}{own}",
        )


@lru_cache(maxsize=1)
def bundled_catalog() -> Catalog:
    """Return the catalogue of the bundled profiles, shared because files are read once."""
    return Catalog()
