"""The matrix of ``nvidia-smi topo -m``, as drivers since 2020 print it: how parts are joined.

It says kinds, no rates: ``NV18`` are 18 bonded NVLinks; PIX, PXB, PHB, NODE and SYS are ever longer
ways over PCIe and between sockets.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from sim.errors import InputError
from sim.interop.link_records import limited

__all__ = ["Topology", "node_document", "read_topology"]

NEAREST = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""Ways over PCIe, shortest first."""
MAX_LINES = 10_000
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_PORT = re.compile(r"NIC\d+|mlx\d+_\d+|bnxt\w*|cx\w+_\d+")


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """A node as its driver sees it.

    Args:
        chips: number of chips. nics: names of NICs.
        joins: (chip, chip) with the smaller first -> code of the matrix, e.g. "NV18" or "PIX".
        ways: (chip, NIC index) -> code.
    """

    chips: int
    nics: tuple[str, ...]
    joins: dict[tuple[int, int], str]
    ways: dict[tuple[int, int], str]

    def kind(self, a: int, b: int) -> str:
        """Return "fabric" for chips joined by NVLink, else "pcie"."""
        code = self.joins[min(a, b), max(a, b)]
        return "fabric" if code.startswith("NV") else "pcie"

    def affinity(self) -> tuple[int, ...]:
        """Return the NIC nearest to each chip; of equally near ones the least used so far."""
        used = [0] * len(self.nics)
        found = []
        for chip in range(self.chips):
            distance = [NEAREST.index(self.ways[chip, nic]) for nic in range(len(self.nics))]
            best = min(range(len(self.nics)), key=lambda n: (distance[n], used[n], n))
            used[best] += 1
            found.append(best)
        return tuple(found)


def read_topology(text: str) -> Topology:
    """Read a matrix.

    Raises:
        InputError: no heading, a row of another length, an unknown code, an asymmetric matrix.
    """
    heading: list[str] = []
    rows: dict[str, list[str]] = {}
    lines = limited(text, "the matrix").splitlines()[:MAX_LINES]
    for number, raw in enumerate(lines, 1):
        line = _ESCAPES.sub("", raw)
        words = line.split()
        if line.strip().startswith("Legend"):
            break
        if not heading:
            heading = [w for w in words if re.fullmatch(r"GPU\d+", w) or _PORT.fullmatch(w)]
            heading = heading if words[: len(heading)] == heading else []
        elif words and words[0] in heading:
            if len(words) < 1 + len(heading):
                raise InputError(
                    "a row that is too short", line=number, found=line.strip()[:60],
                    expected=f"{len(heading)} entries",
                )  # fmt: skip
            rows[words[0]] = words[1 : 1 + len(heading)]
            _check_codes(rows[words[0]], number)
    if not heading:
        raise InputError("no matrix", line=1, expected="a heading GPU0 GPU1 ...")
    return _topology(heading, rows)


def _check_codes(codes: Sequence[str], line: int) -> None:
    for code in codes:
        if code != "X" and code not in NEAREST and not re.fullmatch(r"NV\d+", code):
            raise InputError(
                "an unknown code", line=line, found=code, expected="X NV# " + " ".join(NEAREST)
            )


def _topology(heading: list[str], rows: dict[str, list[str]]) -> Topology:
    chips = [w for w in heading if w.startswith("GPU")]
    nics = tuple(w for w in heading if not w.startswith("GPU"))
    lacking = [c for c in chips if c not in rows]
    if lacking:
        raise InputError("a chip without a row", key=lacking[0], expected="a row per chip")
    at = {w: i for i, w in enumerate(heading)}
    joins, ways = {}, {}
    for i, a in enumerate(chips):
        for j, b in enumerate(chips):
            code = rows[a][at[b]]
            if code != rows[b][at[a]] or (code == "X") != (i == j):
                raise InputError("the matrix is not symmetric", key=f"{a}, {b}", found=code)
            if i < j:
                joins[i, j] = code
        for n, nic in enumerate(nics):
            code = rows[a][at[nic]]
            if code not in NEAREST:
                raise InputError("an unknown way to a NIC", key=f"{a}, {nic}", found=code)
            ways[i, n] = code
    return Topology(chips=len(chips), nics=nics, joins=joins, ways=ways)


def node_document(
    name: str, topology: Topology, accelerator: str, fabric: str, nic: str, source: str
) -> dict[str, Any]:
    """Return a node profile as plain data for ``sim.spec.profiles.NodeDoc``.

    A node has one link between its chips. Where the matrix has several kinds, ``fabric`` should
    name the slowest; a note says which pairs have which.

    Args:
        name: of the profile. topology: read. accelerator, fabric, nic: names of profiles; "" where
            the node has none. source: of the matrix, in words.

    Raises:
        InputError: several chips and no fabric, or NICs and no profile for them.
    """
    if topology.chips > 1 and not fabric:
        raise InputError("a matrix has no rates", key="fabric", expected="a link profile's name")
    if topology.nics and not nic:
        raise InputError("a matrix has no rates", key="nic", expected="a link profile's name")
    of_code: dict[str, list[str]] = {}
    for (a, b), code in topology.joins.items():
        of_code.setdefault(code, []).append(f"{a}-{b}")
    found: dict[str, Any] = {
        "name": name, "source": source, "confidence": "high", "evidence": "found",
        "accelerator": accelerator, "chips": topology.chips,
    }  # fmt: skip
    if topology.chips > 1:
        found["fabric"] = fabric
    if topology.nics:
        found["nics"] = {
            "profile": nic, "count": len(topology.nics), "affinity": list(topology.affinity()),
        }  # fmt: skip
    if len(of_code) > 1:
        found["notes"] = [
            f"{code} between chips " + " ".join(pairs) for code, pairs in sorted(of_code.items())
        ]
    else:
        found["notes"] = [f"{code} between all chips" for code in of_code]
    return found
