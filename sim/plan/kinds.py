"""The op kinds: one table from name to stream class, cost class and memory effect.

Letters follow torch.distributed.pipelining. A strategy may register a further kind with
``register``; its runtime handler is found by entry point.
"""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["KINDS", "MESSAGES", "Kind", "kind", "register"]

MESSAGES = ("PULL", "PUSH")
"""Transfers to an ``on`` block: they have no listed RECV, the engine delivers them."""

Stream = Literal["compute", "host", "d2h", "h2d", "nvme_read", "nvme_write", "group", "pair"]
Cost = Literal["compute", "transfer", "collective", "host"]
Memory = Literal[
    "none", "save", "recompute", "free", "free_input", "free_weight", "gather", "drop", "buffer"
]


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """One op kind.

    Args:
        name: as written in programs.
        stream: where it runs: a rank-local stream, the stream of its member list ("group") or of
            its directed rank pair ("pair").
        cost: which cost function prices its amounts.
        memory: what it does to the memory ledger: "save" activations, "recompute" them, "free"
            them, "gather" or "drop" gathered parameters, hold a "buffer".
        passive: True when the op frees or bookkeeps only and takes no time by itself.
    """

    name: str
    stream: Stream
    cost: Cost
    memory: Memory = "none"
    passive: bool = False


KINDS: dict[str, Kind] = {}


def register(new: Kind) -> Kind:
    """Add a kind to the table.

    Raises:
        ValueError: the name is taken by a different kind or is not an upper-case word.
    """
    if KINDS.get(new.name, new) != new:
        raise ValueError(f"op kind {new.name} is already registered differently")
    if not new.name.replace("_", "").isalnum() or new.name != new.name.upper():
        raise ValueError(f"op kind {new.name!r} must be upper case letters, digits and underscores")
    KINDS[new.name] = new
    return new


def kind(name: str) -> Kind:
    """Look a kind up.

    Raises:
        KeyError: the kind is not registered.
    """
    return KINDS[name]


_TABLE: tuple[tuple[str, Stream, Cost, Memory], ...] = (
    ("F", "compute", "compute", "save"),
    ("R", "compute", "compute", "recompute"),
    ("B", "compute", "compute", "free"),
    ("I", "compute", "compute", "free_input"),
    ("W", "compute", "compute", "free_weight"),
    ("OPT", "compute", "compute", "none"),
    ("LOOKUP", "compute", "compute", "none"),
    ("ENCODE", "compute", "compute", "none"),
    ("DECODE", "compute", "compute", "none"),
    ("SEND_F", "pair", "transfer", "buffer"),
    ("RECV_F", "pair", "transfer", "buffer"),
    ("SEND_B", "pair", "transfer", "buffer"),
    ("RECV_B", "pair", "transfer", "buffer"),
    ("PULL", "pair", "transfer", "none"),
    ("PUSH", "pair", "transfer", "none"),
    ("UNSHARD", "group", "collective", "gather"),
    ("UNSHARD_B", "group", "collective", "gather"),
    ("REDUCE_GRAD", "group", "collective", "none"),
    ("ALL_REDUCE", "group", "collective", "none"),
    ("ALL_GATHER", "group", "collective", "none"),
    ("REDUCE_SCATTER", "group", "collective", "none"),
    ("ALL_TO_ALL", "group", "collective", "none"),
    ("MOVE_EXPERT", "group", "collective", "none"),
    ("REDUCE_EXPERT", "group", "collective", "none"),
    ("BARRIER", "group", "collective", "none"),
    ("D2H", "d2h", "host", "none"),
    ("H2D", "h2d", "host", "none"),
    ("HOST", "host", "host", "none"),
    ("APPLY", "host", "host", "none"),
)
for _name, _stream, _cost, _memory in _TABLE:
    register(Kind(name=_name, stream=_stream, cost=_cost, memory=_memory))
register(Kind(name="RESHARD", stream="compute", cost="compute", memory="drop", passive=True))
