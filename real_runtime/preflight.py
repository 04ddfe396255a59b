"""What must agree between ranks before weights are loaded, and what each rank must have.

Every rank says what it found, rank 0 compares, and all hear the verdict. Imports no torch: ranks
talk through the store of the rendezvous, before any collective can hang.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from real_runtime.errors import RunError
from sim.cost.ledger import peak_memory
from sim.errors import HetlabError, PlanError
from sim.plan.plan import Plan
from sim.problem import Problem

__all__ = [
    "CLOCK_LIMIT", "Fault", "PreflightError", "RankFacts", "Store", "Verdict", "compare",
    "digest_of_data", "exchange", "predicted_memory",
]  # fmt: skip

CLOCK_LIMIT = 1.0
"""[s] by which a rank's clock may surely be off rank 0's: times in logs order errors."""
WHOLE = 16 * 2**20
"""[B] up to which the whole file is hashed."""
ENDS = 2**20
"""[B] hashed of the head and of the tail of a larger one."""
ROUNDS = 3
"""Round trips of which the fastest decides about a rank's clock."""
INPUT, UNEXPECTED = 4, 1
"""Exit codes."""


class PreflightError(HetlabError):
    """The ranks cannot train together. Args: message, exit_code, rank that is at fault."""

    def __init__(self, message: str, exit_code: int = UNEXPECTED, rank: int = 0) -> None:
        super().__init__(message, exit_code, rank)
        self.message, self.exit_code, self.rank = message, exit_code, rank

    def __str__(self) -> str:
        return self.message


class RankFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank found.

    Args:
        rank, host: who. python, torch, hetlab: versions. device: with its number, e.g. "cuda:0".
        build: what torch was built for. backend: of collectives.
        missing: what the backend lacks, or "". unreadable: why the data cannot be read, or "".
        free_bytes: [B] of the device, or of the host for "cpu"; 0 when unknown.
        plan, data: digests. offset_s, round_trip_s: [s] of its clock against rank 0's.
    """

    rank: int
    host: str
    python: str
    torch: str
    hetlab: str
    device: str
    build: str
    backend: str
    missing: str = ""
    unreadable: str = ""
    free_bytes: float = 0.0
    plan: str = ""
    data: str = ""
    offset_s: float = 0.0
    round_trip_s: float = 0.0


class Fault(msgspec.Struct, frozen=True):
    """One thing that is wrong. Args: rank at fault, text that names its host, exit code."""

    rank: int
    text: str
    exit_code: int = UNEXPECTED


class Verdict(msgspec.Struct, frozen=True):
    """What rank 0 says. Args: faults end the run; notes are differences that do not."""

    faults: tuple[Fault, ...] = ()
    notes: tuple[str, ...] = ()


class Store(Protocol):
    """What is needed of ``torch.distributed.Store``."""

    def set(self, key: str, value: str) -> None:  # noqa: D102
        ...

    def get(self, key: str) -> bytes:  # noqa: D102
        ...


def digest_of_data(file: Path) -> str:
    """SHA-256 of a file with its size; of a large one, of size, head and tail.

    Raises:
        PreflightError: it cannot be read.
    """
    try:
        size = file.stat().st_size
        digest = hashlib.sha256(f"{size}:".encode())
        with file.open("rb") as opened:
            if size <= WHOLE:
                digest.update(opened.read())
            else:
                digest.update(opened.read(ENDS))
                opened.seek(size - ENDS)
                digest.update(opened.read(ENDS))
    except OSError as error:
        raise PreflightError(f"data {file}: {error.strerror}", INPUT) from error
    return f"{digest.hexdigest()[:16]} ({size} B)"


def predicted_memory(plan: Plan, problem: Problem) -> dict[int, float]:
    """Rank -> [B] that the ledger expects beside the context; {} where no closed form exists."""
    try:
        ledgers = peak_memory(plan, problem)
    except PlanError:
        # A plan with programs of its own names no schedule, so nothing was predicted.
        return {}
    found: dict[int, float] = {}
    for cell in plan.placement.cells:
        terms = ledgers[cell.stage, cell.replica].terms
        found |= dict.fromkeys(cell.ranks, sum(terms.values()) - terms.get("context", 0.0))
    return found


def exchange(
    store: Store,
    mine: RankFacts,
    size: int,
    judge: Callable[[Sequence[RankFacts]], Verdict],
    clock: Callable[[], float],
) -> Verdict:
    """Let rank 0 hear all ranks and judge; every rank must call this.

    Args:
        store: of the rendezvous. mine: facts of this rank. size: of the world.
        judge: of all facts in order of rank. clock: [s], of this rank.

    Returns:
        The verdict, equal on all ranks.

    Raises:
        RunError: a rank did not answer before the store's deadline.
    """
    rank = mine.rank
    if rank:
        offset, trip = _clock_of(store, rank, clock)
        mine = msgspec.structs.replace(mine, offset_s=offset, round_trip_s=trip)
        store.set(f"facts/{rank}", msgspec.json.encode(mine).decode())
        return msgspec.json.decode(_heard(store, "verdict", 0), type=Verdict)
    facts = [mine]
    for other in range(1, size):
        for n in range(ROUNDS):
            _heard(store, f"ping/{other}/{n}", other)
            store.set(f"pong/{other}/{n}", repr(clock()))
        facts.append(msgspec.json.decode(_heard(store, f"facts/{other}", other), type=RankFacts))
    verdict = judge(facts)
    store.set("verdict", msgspec.json.encode(verdict).decode())
    return verdict


def _clock_of(store: Store, rank: int, clock: Callable[[], float]) -> tuple[float, float]:
    """(offset, round trip) [s] of this rank's clock, as NTP has it (RFC 5905, section 8)."""
    trips = []
    for n in range(ROUNDS):
        sent = clock()
        store.set(f"ping/{rank}/{n}", "")
        there = float(_heard(store, f"pong/{rank}/{n}", 0))
        back = clock()
        # The first round also waits for rank 0 to come to this rank; the fastest does not.
        trips.append((back - sent, (sent + back) / 2 - there))
    trip, offset = min(trips)
    return offset, trip


def _heard(store: Store, key: str, rank: int) -> bytes:
    try:
        return store.get(key)
    except RuntimeError as error:
        raise RunError(f"rank {rank} did not answer before training; gone or silent") from error


def compare(facts: Sequence[RankFacts], predicted: Mapping[int, float]) -> Verdict:
    """Hold all ranks against rank 0 and against what they need.

    Args:
        facts: in order of rank. predicted: rank -> [B], see ``predicted_memory``.
    """
    first, faults, notes = facts[0], list[Fault](), dict[str, None]()
    for f in facts:
        if f.missing:
            faults.append(Fault(f.rank, f"on {f.host}: {f.missing}"))
        if f.unreadable:
            faults.append(Fault(f.rank, f"on {f.host}: {f.unreadable}", INPUT))
    for f in facts[1:]:
        for name, key, code in (
            ("hetlab", lambda x: x.hetlab, UNEXPECTED),
            ("torch", lambda x: _minor(x.torch), UNEXPECTED),
            ("torch built for", lambda x: x.build, UNEXPECTED),
            ("backend", lambda x: x.backend, UNEXPECTED),
            ("plan", lambda x: x.plan, INPUT),
            ("data", lambda x: x.data, INPUT),
        ):
            here, there = key(f), key(first)
            if here != there and here and there:
                text = f"on {f.host}: {name} {here}, but {there} on rank 0 on {first.host}"
                faults.append(Fault(f.rank, text, code))
        for name, here, there in (
            ("python", f.python, first.python), ("torch", f.torch, first.torch),
        ):  # fmt: skip
            if here != there:
                notes[f"{name} {here} on {f.host}, {there} on {first.host}"] = None
        sure = abs(f.offset_s) - f.round_trip_s / 2
        if sure > CLOCK_LIMIT:
            way = "ahead of" if f.offset_s > 0 else "behind"
            text = (
                f"on {f.host}: its clock is {abs(f.offset_s):.1f} s {way} rank 0's on {first.host}"
            )
            faults.append(Fault(f.rank, text))
    faults += _short(facts, predicted)
    return Verdict(tuple(sorted(faults, key=lambda f: f.rank)), tuple(notes))


def _minor(version: str) -> str:
    """Major and minor: "2.13" of "2.13.0+cpu"."""
    return ".".join(version.split("+")[0].split(".")[:2])


def _short(facts: Sequence[RankFacts], predicted: Mapping[int, float]) -> list[Fault]:
    """Ranks whose device, shared by all ranks there, has too little left."""
    users: dict[tuple[str, str], list[RankFacts]] = defaultdict(list)
    for f in facts:
        users[f.host, f.device].append(f)
    found = []
    for (host, device), ranks in users.items():
        need = sum(predicted.get(f.rank, 0.0) for f in ranks)
        free = min(f.free_bytes for f in ranks)
        if free and need > free:
            for_all = f" of {len(ranks)} ranks" if len(ranks) > 1 else ""
            text = (
                f"on {host}: {free / 2**30:.2f} GiB are free on {device}, the plan needs "
                f"{need / 2**30:.2f} GiB{for_all} there beside the context"
            )
            found.append(Fault(ranks[0].rank, text))
    return found
