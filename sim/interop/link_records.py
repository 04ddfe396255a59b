"""Measured messages of other tools -> size-dependent link profiles.

Tools measure two things. A message alone takes ``latency + nbytes / (rate share(nbytes))``, the
cost model's own form. Many messages in flight reach a rate, which is ``rate share(nbytes)``.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from sim.errors import InputError

__all__ = [
    "MAX_FILE",
    "MAX_TEXT",
    "ROUNDS",
    "Transfer",
    "alone_curve",
    "limited",
    "link_document",
    "member_transfer",
    "unpacked",
]

MAX_TEXT = 64 * 2**20
"""[characters] of the longest text that is read."""
MAX_FILE = 512 * 2**20
"""[B] of the longest file, unpacked."""
NOISE = 0.05
"""A message takes at least this share of the latency longer than an empty one; less is noise."""

ROUNDS: dict[str, Callable[[int], tuple[int, float]]] = {
    "all_reduce": lambda n: (2 * (n - 1), 1.0 / n),
    "all_gather": lambda n: (n - 1, 1.0 / n),
    "reduce_scatter": lambda n: (n - 1, 1.0 / n),
    "sendrecv": lambda n: (1, 1.0),
}
"""Of a ring of n: rounds, and the share of the tensor that each sends (Patarasuk and Yuan 2009)."""


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """One size of message.

    Args:
        nbytes: [B]. seconds: [s] of one message alone, latency included, 0 where that was not
            measured. rate: [B/s] with many in flight, 0 likewise.
    """

    nbytes: float
    seconds: float = 0.0
    rate: float = 0.0


def limited(text: str, what: str, limit: int = MAX_TEXT) -> str:
    """Return the text.

    Raises:
        InputError: it is longer than ``limit`` characters, or empty.
    """
    if len(text) > limit:
        raise InputError(
            f"{what} is too long", found=f"{len(text)} characters", expected=f"at most {limit}"
        )
    if not text.strip():
        raise InputError(f"{what} is empty")
    return text


def unpacked(data: bytes, limit: int = MAX_FILE) -> str:
    """Return a file's text, gzip or plain.

    Raises:
        InputError: broken compression, no UTF-8, or more than ``limit`` bytes.
    """
    if data[:2] == b"\x1f\x8b":
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as packed:
                data = packed.read(limit + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise InputError("a broken gzip file", found=str(error)) from None
    if len(data) > limit:
        raise InputError("the file is too long", expected=f"at most {limit} bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError("not UTF-8 text", found=f"byte {error.start}") from None


def member_transfer(collective: str, ranks: int, nbytes: float, seconds: float) -> Transfer:
    """Return the message between neighbours that makes a ring take this long.

    Args:
        collective: a key of ``ROUNDS``. ranks: members. nbytes: [B] of the whole tensor.
        seconds: [s] that the collective took.

    Raises:
        InputError: a collective that is no ring of equal rounds, or a group of one.
    """
    if collective not in ROUNDS:
        raise InputError(
            "no link follows from this collective", found=collective or "none named",
            expected=" ".join(ROUNDS),
        )  # fmt: skip
    if ranks < 2:
        raise InputError("a collective of one rank uses no link", found=f"{ranks} ranks")
    rounds, share = ROUNDS[collective](ranks)
    return Transfer(nbytes=nbytes * share, seconds=seconds / rounds)


def alone_curve(
    sizes: Sequence[float], seconds: Sequence[float]
) -> tuple[float, float, tuple[tuple[float, float], ...]]:
    """Fit latency, rate and curve to messages alone; times that grow with size come out again.

    A time above a longer message's counts as that one. The shortest message is all latency. What is
    left of another is its bytes over the rate, at least ``NOISE`` of the latency. The best size
    gives the rate.

    Args:
        sizes: [B] strictly growing, at least two. seconds: [s].

    Returns:
        Latency [s], rate [B/s], ((nbytes [B], share of the rate), ...) without the first size.
    """
    # A shorter message takes no longer than a longer one; what disturbs a measurement only adds.
    quiet = np.minimum.accumulate(np.array(seconds)[::-1])[::-1]
    latency = float(quiet[0])
    reached = np.array(sizes[1:]) / np.maximum(quiet[1:] - latency, NOISE * latency)
    rate = float(reached.max())
    points = zip(np.array(sizes[1:]).tolist(), (reached / rate).tolist(), strict=True)
    return latency, rate, tuple(points)


def link_document(
    name: str, transfers: Iterable[Transfer], source: str, *, kind: str = "nic", date: str = ""
) -> dict[str, Any]:
    """Return a link profile as plain data for ``sim.spec.profiles.LinkDoc``.

    Rates in flight give the curve where there are any, messages alone the latency; without rates
    in flight messages alone give both. A message crosses two ports, so each gets half the latency.

    Args:
        name: of the profile. transfers: measured. source: what measured them, in words.
        kind: of the link. date: of the measurement, or "".

    Raises:
        InputError: too few sizes.
    """
    alone, flight = _by_size(transfers, "seconds"), _by_size(transfers, "rate")
    found: dict[str, Any] = {
        "name": name, "kind": kind, "source": source, "confidence": "medium", "evidence": "derived",
    } | ({"date": date} if date else {})  # fmt: skip
    latency = min(alone.values(), default=0.0)
    if flight:
        rate = max(flight.values())
        points = tuple((size, reached / rate) for size, reached in flight.items())
    elif len(alone) > 1:
        latency, rate, points = alone_curve(list(alone), list(alone.values()))
    else:
        raise InputError(
            "too few sizes for a link", found=f"{len(alone)} of messages alone",
            expected="two sizes, or rates of messages in flight",
        )  # fmt: skip
    found["rate"] = f"{rate!r} B/s"
    if alone:
        found["latency"] = {
            "value": f"{latency / 2!r} s",
            "source": f"{source}; half of a message's, which crosses two ports",
        }
    else:
        found["notes"] = ["no latency was measured: it counts as 0"]
    found["curve"] = [{"size": f"{round(size)} B", "fraction": share} for size, share in points]
    return found


def _by_size(transfers: Iterable[Transfer], field: str) -> dict[float, float]:
    """Size -> median of what was measured, by growing size."""
    found: dict[float, list[float]] = defaultdict(list)
    for t in transfers:
        value = getattr(t, field)
        if value > 0 and round(t.nbytes) > 0:
            found[float(round(t.nbytes))].append(value)
    return {size: float(np.median(found[size])) for size in sorted(found)}
