"""What ``hetlab probe`` saw of this machine, kept in the user's state folder. Imports no torch.

A plan is made for one cluster. The record says which clusters describe this host: the one that was
probed last, and those that ``hetlab calibrate`` corrected from it.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import msgspec

from sim.cli_output import logger
from sim.errors import InputError
from sim.interop.files import write_whole
from sim.plan.plan import Plan
from sim.problem import load_problem, problem_hash
from sim.settings import state_folder

__all__ = [
    "Probed", "Seen", "check_probed", "cluster_of", "record_file", "remember",
    "remember_calibrated",
]  # fmt: skip


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster that describes a host. Args: file, cluster_hash of its document, date, name."""

    file: str
    cluster_hash: str
    date: str
    name: str


class Probed(msgspec.Struct, frozen=True, kw_only=True):
    """The record. Args: hosts: name -> what was probed there, then its calibrations."""

    hosts: dict[str, tuple[Seen, ...]] = {}


def record_file() -> Path:
    """Return where the record lies."""
    return state_folder() / "probed.json"


def _read() -> Probed:
    file = record_file()
    try:
        return msgspec.json.decode(file.read_bytes(), type=Probed)
    except OSError:  # none there, or none that this user may read
        return Probed()
    except msgspec.DecodeError as error:
        raise InputError(
            "the record of hetlab probe cannot be read", str(file), found=str(error),
            expected="what hetlab probe wrote; remove it or probe again",
        ) from error  # fmt: skip


def _write(seen: tuple[Seen, ...], before: Probed) -> None:
    file = record_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError("cannot write it", str(file), found=str(error)) from error
    hosts = before.hosts | {socket.gethostname(): seen}
    raw = msgspec.json.format(msgspec.json.encode(Probed(hosts=hosts)), indent=2)
    write_whole(file, raw.decode() + "\n")


def _seen(cluster: dict[str, Any], file: Path, date: str) -> Seen:
    return Seen(
        file=str(file.absolute()), cluster_hash=problem_hash(cluster), date=date,
        name=cluster["name"],
    )  # fmt: skip


def cluster_of(file: Path) -> dict[str, Any]:
    """Return a complete cluster file's document as problems carry it.

    Raises:
        InputError: it is none.
    """
    # The document of a cluster does not depend on what is trained there.
    problem = load_problem(file, "llama_tiny", "two_processes")
    found: dict[str, Any] = problem.documents["cluster"]
    return found


def remember(cluster: dict[str, Any], file: Path, date: str) -> None:
    """Record that a cluster was probed on this host; what was recorded of the host before is gone.

    A record that cannot be read is replaced.

    Args:
        cluster: its document as problems carry it. file: where it lies. date: as 2026-01-31.

    Raises:
        InputError: the record cannot be written.
    """
    try:
        before = _read()
    except InputError:
        before = Probed()
    _write((_seen(cluster, file, date),), before)


def remember_calibrated(
    corrected: dict[str, Any], cluster: dict[str, Any], file: Path, date: str
) -> bool:
    """Record a calibration of this host's cluster; return whether it was one.

    Args:
        corrected: document. cluster: that it corrects. file: where the corrected one lies.
        date: as 2026-01-31.

    Raises:
        InputError: the record cannot be read or written.
    """
    before = _read()
    mine = before.hosts.get(socket.gethostname(), ())
    if problem_hash(cluster) not in {s.cluster_hash for s in mine}:
        return False
    new = _seen(corrected, file, date)
    _write((*(s for s in mine if s.file != new.file), new), before)
    return True


def check_probed(plan: Plan, plan_file: Path, allowed: bool) -> None:
    """Refuse a plan for another cluster than this host was probed as; no record, no refusal.

    Args:
        plan: to run. plan_file: it. allowed: say so only.

    Raises:
        InputError: the plan's cluster is none of the record's, or this cannot be read.
    """
    try:
        mine = _read().hosts.get(socket.gethostname(), ())
    except InputError as error:
        if not allowed:
            raise
        logger.warning("%s", error)
        return
    planned = plan.problem["cluster"]
    own = problem_hash(planned)
    if not mine or own in {s.cluster_hash for s in mine}:
        return
    last = mine[-1]
    hint = "" if allowed else ": plan for that file, or give --allow-other-cluster"
    refusal = InputError(
        "the plan was made for another cluster than this machine was probed as", str(plan_file),
        key="problem.cluster", found=f"{planned['name']} {own}",
        expected=f"{last.name} {last.cluster_hash}, from {last.file} on {last.date}{hint} (the "
        f"record is {record_file()})",
    )  # fmt: skip
    if not allowed:
        raise refusal
    logger.warning("%s", refusal)
