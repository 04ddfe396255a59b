"""A problem: cluster, model and job, resolved, frozen and content-hashed.

Its documents are self-contained: the profiles a cluster file names are written into it, so that a
plan can carry its problem and be simulated where the catalogue differs or is missing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

import hardware_profiles
from sim.errors import InputError, UsageError
from sim.hardware.build import build_machine
from sim.hardware.catalog import Catalog, DefaultsDoc, bundled_catalog
from sim.hardware.check import inherit_ports, machine_problems
from sim.hardware.machine import Machine
from sim.model.graph import Model
from sim.model.load import load_model_source
from sim.model.sizes import published, published_names
from sim.spec.cluster import ClusterDoc, ProfilesDoc
from sim.spec.fields import Stated
from sim.spec.job import Job, JobDoc, job_from_doc
from sim.spec.load import Source, read_source, validate
from sim.spec.overrides import apply_overrides
from sim.spec.profiles import AcceleratorDoc, AcceleratorNumbers, LinkUse, NodeNumbers

__all__ = ["Input", "Problem", "load_problem", "problem_from_documents", "problem_hash"]

Input = str | Path | dict[str, Any]
"""A file's path, the name of a bundled document, or the document's content."""

FORMAT = 1
_PARTS = ("cluster", "model", "job")


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be planned.

    Args:
        machine: resolved cluster. model: blocks and edges. job: in SI.
        documents: the normalised documents, plain JSON data: "cluster" (with the profiles it
            uses), "model", "model_name", "job", "format".
        hash: of ``documents``, 16 hex digits. assumptions: what had to be assumed, in words.
    """

    machine: Machine
    model: Model
    job: Job
    documents: dict[str, Any]
    hash: str
    assumptions: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """One line: what is trained on what."""
        return (
            f"Problem({self.model.name} on {self.machine.name}, {self.machine.num_chips} chips, "
            f"batch {self.job.global_batch} x {self.job.sequence_length}, {self.hash})"
        )


def load_problem(
    cluster: Input,
    model: Input,
    job: Input,
    overrides: Sequence[str] = (),
    catalog: Catalog | None = None,
) -> Problem:
    """Read and resolve the three documents of a problem.

    Args:
        cluster, model, job: see ``Input``; a name that is no file is looked up among the bundled
            documents.
        overrides: "cluster.PATH=value", "model.PATH=value" or "job.PATH=value".
        catalog: where profiles lie; None means the bundled ones.

    Raises:
        InputError: a document is wrong. UsageError: an override names no document.
    """
    changes = _by_document(overrides)
    sources = {
        part: apply_overrides(_source(part, given, catalog), changes[part], part)
        for part, given in zip(_PARTS, (cluster, model, job), strict=True)
    }
    known = catalog or bundled_catalog()
    sources["cluster"] = inherit_ports(sources["cluster"], known)
    cluster_doc = validate(ClusterDoc, sources["cluster"])
    job_doc = validate(JobDoc, sources["job"])
    job_data = job_doc.model_dump(mode="json", exclude_none=True)
    resolved = job_from_doc(job_doc)
    built = _model(sources["model"], resolved)
    try:
        machine = build_machine(cluster_doc, known)
    except InputError as error:
        found = machine_problems(cluster_doc, sources["cluster"], known)
        raise (found or [error])[0] from None
    documents = {
        "format": FORMAT,
        "cluster": _with_profiles(cluster_doc, known).model_dump(
            mode="json", exclude_defaults=True
        ),
        "model": sources["model"].data,
        "model_name": built.name,
        "job": job_data,
    }
    try:
        return _assemble(machine, built, resolved, documents)
    except InputError as error:
        part, _, rest = error.key.partition(".")
        if error.file or part not in sources:
            raise
        file, line = sources[part].where((rest,))
        raise InputError(error.message, file, line, rest, error.found, error.expected) from None


def problem_from_documents(documents: dict[str, Any]) -> Problem:
    """Rebuild a problem from the documents a plan carries.

    Raises:
        InputError: a document is missing or wrong, or of another format.
    """
    missing = [part for part in (*_PARTS, "format") if part not in documents]
    if missing:
        raise InputError("the problem lacks a document", key=f"problem.{missing[0]}")
    if documents["format"] != FORMAT:
        raise InputError(
            "a problem of another format",
            key="problem.format",
            found=str(documents["format"]),
            expected=str(FORMAT),
        )
    cluster_doc = validate(ClusterDoc, Source(documents["cluster"], "problem.cluster"))
    job = job_from_doc(validate(JobDoc, Source(documents["job"], "problem.job")))
    source = Source(documents["model"], "problem.model")
    model = _model(source, job, documents.get("model_name", ""))
    return _assemble(build_machine(cluster_doc), model, job, documents)


def problem_hash(documents: dict[str, Any]) -> str:
    """SHA-256 over the canonical JSON of a problem's documents (16 hex digits)."""
    return hashlib.sha256(msgspec.json.encode(documents, order="sorted")).hexdigest()[:16]


def _assemble(machine: Machine, model: Model, job: Job, documents: dict[str, Any]) -> Problem:
    if model.max_seq and job.sequence_length > model.max_seq and model.family != "measured":
        note = (
            f"sequences of {job.sequence_length} exceed the {model.max_seq} of the model's config"
        )
        notes: tuple[str, ...] = (note,)
    else:
        notes = ()
    if model.family == "measured" and job.sequence_length != model.max_seq:
        raise InputError(
            "the model's times belong to another sequence length",
            key="job.sequence_length",
            found=str(job.sequence_length),
            expected=str(model.max_seq),
        )
    return Problem(
        machine=machine,
        model=model,
        job=job,
        documents=documents,
        hash=problem_hash(documents),
        assumptions=tuple(dict.fromkeys((*machine.assumptions, *model.assumptions, *notes))),
    )


def _model(source: Source, job: Job, name: str = "") -> Model:
    return load_model_source(source, flash=job.flash_attention, dropout=job.dropout, name=name)


def _by_document(overrides: Sequence[str]) -> dict[str, list[str]]:
    changes: dict[str, list[str]] = {part: [] for part in _PARTS}
    for text in overrides:
        part, _, rest = text.partition(".")
        if part not in changes or not rest:
            raise UsageError(f"--set {text}: expected cluster.PATH=, model.PATH= or job.PATH=value")
        changes[part].append(rest)
    return changes


def _source(part: str, given: Input, catalog: Catalog | None) -> Source:
    if isinstance(given, dict):
        return Source(given, part)
    if part == "model" and not Path(given).exists():
        known = published(str(given))
        if known is not None:
            return known
    kind, suffix = part + "s", ".json" if part == "model" else ".yaml"
    if not Path(given).exists() and Path(given).name == str(given) and not Path(given).suffix:
        names = sorted(
            f.name.removesuffix(suffix)
            for f in hardware_profiles.folder(kind).iterdir()
            if f.name.endswith(suffix)
        )
        if part == "cluster" and catalog is not None:
            names = list(catalog.names("clusters"))
        if str(given) not in names:
            raise InputError(
                f"neither a file nor a bundled {part}",
                file=str(given),
                expected="a path, or one of "
                + ", ".join((*names, *(published_names() if part == "model" else ()))),
            )
        if part == "cluster" and catalog is not None:
            doc = catalog.cluster(str(given))
            return Source(doc.model_dump(mode="json", exclude_defaults=True), str(given))
        return read_source(Path(str(hardware_profiles.folder(kind) / f"{given}{suffix}")))
    return read_source(given)


def _with_profiles(doc: ClusterDoc, catalog: Catalog) -> ClusterDoc:
    """Write every profile a cluster uses, defaults included, into its document."""
    known = catalog.extended(doc.profiles)
    uses = [nodes for site in doc.sites for nodes in site.nodes]
    nodes = {n.profile: known.node(n.profile) for n in uses if n.profile}
    kinds: Iterable[NodeNumbers] = (*uses, *nodes.values())
    names = {n.accelerator for n in kinds if n.accelerator}
    ports: list[LinkUse | None] = [u for n in kinds for u in (n.fabric, n.nics)]
    ports += [*(site.fabric for site in doc.sites), *doc.links]
    links = {u.profile: known.link(u.profile) for u in ports if u is not None and u.profile}
    profiles = ProfilesDoc(
        accelerators=tuple(
            _complete(known.accelerator(name), known.defaults()) for name in sorted(names)
        ),
        links=tuple(links[name] for name in sorted(links)),
        nodes=tuple(nodes[name] for name in sorted(nodes)),
    )
    return doc.model_copy(update={"profiles": profiles})


def _complete(doc: AcceleratorDoc, defaults: DefaultsDoc) -> AcceleratorDoc:
    """Fill what a profile leaves open, each number with the defaults' own origin."""
    filled: dict[str, Any] = {}
    for key in AcceleratorNumbers.model_fields:
        value = getattr(defaults, key)
        if getattr(doc, key) is not None or value is None:
            continue
        if isinstance(value, Stated):
            value = value.model_copy(
                update={
                    "source": value.source or defaults.source,
                    "confidence": value.confidence or defaults.confidence,
                    "evidence": value.evidence or defaults.evidence,
                }
            )
        filled[key] = value
    return doc.model_copy(update=filled)
