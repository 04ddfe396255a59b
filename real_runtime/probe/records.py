"""What a probe measures, as plain records. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

__all__ = ["MIN_REPEATS", "Facts", "ProbeSettings", "Record", "merged", "select", "spread"]

MIN_REPEATS = 7
"""Fewest repeats that a median with quartiles is made of."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One measured time.

    Args:
        what: "gemm", "copy", "elementwise", "attention", "block", "layer", "dispatch", "ping",
            "collective", "overlap" or "host_copy". name: which of its kind, e.g. a dtype.
        sizes: numbers that say how much, e.g. m, n, k or nbytes [B].
        median, low, high: [s] median and quartiles over ``repeats`` repeats.
    """

    what: str
    name: str = ""
    sizes: dict[str, float] = {}
    median: float
    low: float
    high: float
    repeats: int


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank knows about its machine without measuring.

    Args:
        device: type of torch device. chip: its name, "" where there is none. vendor: maker or "".
        memory: [B] of the device, or of the host divided by its ranks.
        host_memory: [B]. context: [B] that the process takes before any tensor.
        torch: version. threads: of each rank. cores: that the process may use.
    """

    device: str
    chip: str
    vendor: str
    memory: float
    host_memory: float
    context: float
    torch: str
    threads: int
    cores: int


class ProbeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure.

    Args:
        ranks: processes that measure at once, as they would compute at once. threads: of each.
        repeats: per number. floor: [s] that one repeat lasts at least.
        tokens, weights: rows m, and (n, k) of the products; each also as both gradients.
        dtypes: of the products; () for those the device has.
        elements: of the tensors that elementwise work and copies cross.
        cores: (batch, heads, sequence length, head size) of the attention cores.
        layers: (hidden, ffn, heads, batch, sequence length) of whole layers.
        messages: [B] of transfers and collectives.
        heaviest: [FLOP] of the largest product on a processor; larger shapes are left out.
    """

    ranks: int = 2
    threads: int = 1
    repeats: int = 9
    floor: float = 1e-2
    tokens: tuple[int, ...] = (32, 128, 512, 2048)
    weights: tuple[tuple[int, int], ...] = (
        (128, 128), (384, 128), (128, 384), (512, 512), (1024, 256), (1024, 1024), (2048, 1024),
    )  # fmt: skip
    dtypes: tuple[str, ...] = ()
    elements: tuple[int, ...] = (1 << 15, 1 << 18, 1 << 21, 1 << 24)
    cores: tuple[tuple[int, int, int, int], ...] = (
        (4, 4, 64, 32), (2, 8, 256, 64), (1, 8, 512, 64),
    )  # fmt: skip
    layers: tuple[tuple[int, int, int, int, int], ...] = (
        (128, 352, 4, 8, 64), (192, 512, 6, 2, 256), (384, 1024, 6, 2, 64), (384, 1024, 6, 4, 128),
        (512, 1376, 8, 1, 256),
    )  # fmt: skip
    messages: tuple[int, ...] = tuple(4**i for i in range(1, 14))
    heaviest: float = 2e9


QUICK = ProbeSettings(
    repeats=MIN_REPEATS, floor=5e-4, tokens=(32, 256), weights=((128, 128), (512, 256)),
    elements=(1 << 15, 1 << 20), cores=((2, 4, 64, 32),),
    layers=((128, 352, 4, 4, 64), (192, 512, 6, 2, 128)), messages=(4, 1 << 12, 1 << 16, 1 << 20),
)  # fmt: skip
"""A first idea in seconds."""


def spread(record: Record) -> float:
    """Return the distance of the quartiles over the median."""
    return (record.high - record.low) / record.median if record.median > 0 else math.inf


def select(records: Iterable[Record], what: str, name: str | None = None) -> list[Record]:
    """Return the records of one kind, and of one name."""
    return [r for r in records if r.what == what and (name is None or r.name == name)]


def merged(of_ranks: Sequence[Sequence[Record]]) -> list[Record]:
    """One record for the same thing on all ranks: medians of medians and of quartiles.

    Args:
        of_ranks: records of each rank, in one order; a rank may lack some.
    """
    together: dict[object, list[Record]] = {}
    for records in of_ranks:
        for r in records:
            together.setdefault((r.what, r.name, *sorted(r.sizes.items())), []).append(r)
    return [
        msgspec.structs.replace(
            same[0],
            median=float(np.median([r.median for r in same])),
            low=float(np.median([r.low for r in same])),
            high=float(np.median([r.high for r in same])),
        )
        for same in together.values()
    ]
