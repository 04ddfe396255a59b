"""How the tokens of lent experts are shared out over the devices that hold them.

Three ways. *local* needs nothing but a device's own gate result; *even* needs none of the others'
loads; *balanced* needs all counts. m lent experts, D devices, which are the sources too.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

__all__ = ["balanced", "even", "local", "lowest_level", "node_rows"]

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def local(counts: Ints, hosts: Bools, home: Ints) -> Ints:
    """Hosts compute their own tokens, all others' go home (Pro-Prophet, arXiv:2411.10003, sec. 4).

    Args:
        counts: tokens of each lent expert from each source, shape (m, D).
        hosts: shape (m, D). home: shape (m,).

    Returns:
        Tokens from each source to each device, shape (m, D, D).
    """
    num_lent, num_devices = counts.shape
    found = np.zeros((num_lent, num_devices, num_devices), np.int64)
    device = np.arange(num_devices)
    stays = np.where(hosts, counts, 0)
    found[:, device, device] = stays
    found[np.arange(num_lent)[:, None], device, home[:, None]] += counts - stays
    return found


def even(counts: Ints, hosts: Bools, nodes: Ints) -> Ints:
    """Each source spreads its tokens evenly over the hosts of its node, else over all hosts.

    LAER-MoE's "lite routing" and FlexMoE as re-implemented there. What does not divide goes one
    token each to hosts that differ from source to source.

    Args:
        counts, hosts: as in :func:`local`. nodes: node of each device, shape (D,).
    """
    near = hosts[:, None, :] & (nodes[:, None] == nodes[None, :])
    to = np.where(near.any(axis=2, keepdims=True), near, hosts[:, None, :])
    number = to.sum(axis=2)
    share, rest = np.divmod(counts, number)
    first = np.arange(counts.shape[1]) % number
    place = to.cumsum(axis=2, dtype=np.int64) - 1 - first[:, :, None]
    place += np.where(place < 0, number[:, :, None], 0)
    return np.asarray(np.where(to, share[:, :, None] + (place < rest[:, :, None]), 0), np.int64)


def balanced(counts: Ints, hosts: Bools, rest: Ints, nodes: Ints, slack: float) -> Ints:
    """Tokens stay at their source, then in its node, while no device passes the level.

    The level is the least that the hosts allow (:func:`lowest_level`), or with a slack (1 + slack)
    times the mean load where that is more. Within it the fullest device never gets more; which
    tokens stay is decided greedily, experts with few hosts first.

    Args:
        counts, hosts: as in :func:`local`. rest: tokens of all other experts on each device, (D,).
        nodes: node of each device, shape (D,). slack: see above.
    """
    total = int(counts.sum() + rest.sum())
    level = total
    if 1.0 + slack < rest.size:
        level = int((1.0 + slack) * total / rest.size)
        level = max(level, lowest_level(counts.sum(axis=1), hosts, rest))
    order = _few_hosts_first(counts.sum(axis=1), hosts)
    own = np.where(hosts, counts, 0)[order]
    before = np.cumsum(own, axis=0) - own
    placed = np.zeros_like(counts)
    placed[order] = np.clip(level - rest - before, 0, own)
    load = rest + placed.sum(axis=0)
    left = counts - placed
    by_node, everywhere = node_rows(nodes), np.arange(rest.size)[None, :]
    rows = (by_node, everywhere) if 1 < len(by_node) < rest.size else (everywhere,)
    for part in rows:
        for e in order:
            need = _by_row(left[e], part)
            if not need.any():
                continue
            more = _poured(need, load, hosts[e], part, level)
            load += more
            placed[e] += more
            left[e] = 0
            left[e][part[:, 0]] = need - _by_row(more, part)
    missing = left.sum(axis=1)
    _complete(placed, missing, level - load, hosts)
    return _routed(counts, placed, rows)


def lowest_level(amounts: Ints, hosts: Bools, rest: Ints) -> int:
    """Return the least load of the fullest device over all ways to share out whole tokens.

    A maximum flow from experts to devices of capacity ``level - rest``. Where it does not carry
    everything, the experts that an augmenting search reaches fill all their hosts, so their mean is
    a higher level that no way can beat; it is tried next (Dinkelbach's step, as in parametric
    flows). The optimum over fractions, rounded up.

    Args:
        amounts: tokens of each lent expert, (m,). hosts: (m, D). rest: load besides them, (D,).
    """
    reach = hosts.any(axis=0)
    level = int(rest.max(initial=0))
    if reach.any():
        level = max(level, _mean_up(int(amounts.sum() + rest[reach].sum()), int(reach.sum())))
    placed, load = np.zeros(hosts.shape, np.int64), rest.copy()
    missing = amounts.copy()
    everywhere = np.arange(rest.size)[None, :]
    for e in _few_hosts_first(amounts, hosts):
        placed[e] = _poured(missing[e : e + 1], load, hosts[e], everywhere, level)
        load += placed[e]
        missing[e] -= placed[e].sum()
    room = level - load
    while (stuck := _complete(placed, missing, room, hosts)) is not None:
        full = hosts[stuck].any(axis=0)
        higher = _mean_up(int(amounts[stuck].sum() + rest[full].sum()), int(full.sum()))
        room += higher - level
        level = higher
    return level


def _mean_up(amount: int, number: int) -> int:
    return -(-amount // number)


def _few_hosts_first(amounts: Ints, hosts: Bools) -> Ints:
    """Fewest hosts first, then the largest amount, then the index."""
    return np.lexsort((-amounts, hosts.sum(axis=1)))


def node_rows(nodes: Ints) -> Ints:
    """Return the devices of each node, a row each, padded with -1."""
    names, member = np.unique(nodes, return_inverse=True)
    sizes = np.bincount(member)
    rows = np.full((names.size, int(sizes.max())), -1, np.int64)
    order = np.argsort(member, kind="stable")
    starts = np.cumsum(sizes) - sizes
    rows[member[order], np.arange(nodes.size) - starts[member[order]]] = order
    return rows


def _by_row(values: Ints, rows: Ints) -> Ints:
    return np.asarray(values[rows].sum(axis=1, where=rows >= 0), np.int64)


def _poured(need: Ints, load: Ints, hosts: Bools, rows: Ints, cap: int) -> Ints:
    """Tokens poured on each device, shape (D,): per row its need, onto the least loaded hosts.

    Args:
        need: tokens per row. load: of each device. hosts: of the expert. rows: devices per row.
        cap: no device is filled above it.
    """
    full = int(load.max()) + int(need.max()) + 1
    level = np.where((rows >= 0) & hosts[rows], load[rows], full)
    order = np.argsort(level, axis=1, kind="stable")
    rising = np.take_along_axis(level, order, axis=1)
    number = np.arange(1, rows.shape[1] + 1)
    reached = ((need[:, None] + np.cumsum(rising, axis=1)) // number).min(axis=1)
    given = np.maximum(reached[:, None] - rising, 0)
    odd = need - given.sum(axis=1)
    given += (number - 1 < odd[:, None]) & (rising <= reached[:, None]) & (rising < full)
    given = np.clip(given, 0, np.maximum(cap - rising, 0))
    found = np.zeros_like(load)
    devices = np.take_along_axis(rows, order, axis=1)
    inside = rising < full
    found[devices[inside]] = given[inside]
    return found


def _complete(placed: Ints, missing: Ints, room: Ints, hosts: Bools) -> Ints | None:
    """Place what is missing along augmenting paths, in place; where stuck return those experts.

    Args:
        placed: tokens of each expert on each device, (m, D). missing: not yet placed, (m,).
        room: tokens that each device still takes, (D,). hosts: (m, D).
    """
    for start in np.flatnonzero(missing).tolist():
        while missing[start]:
            path, reached = _way_out(start, placed, room, hosts)
            if not path:
                return reached
            moved = min(int(missing[start]), int(room[path[0][1]]))
            for (e, _), (_, d) in pairwise(path):
                moved = min(moved, int(placed[e, d]))
            for k, (e, d) in enumerate(path):
                placed[e, d] += moved
                if k + 1 < len(path):
                    placed[e, path[k + 1][1]] -= moved
            room[path[0][1]] -= moved
            missing[start] -= moved
    return None


def _way_out(
    start: int, placed: Ints, room: Ints, hosts: Bools
) -> tuple[list[tuple[int, int]], Ints]:
    """A shortest augmenting path of an expert, or the experts that share its full devices.

    Returns:
        (expert, device) from a device with room back to the expert, each expert giving up tokens on
        the next pair's device; [] where there is none. And the experts reached.
    """
    by, at = np.full(room.size, -1), np.full(len(hosts), -1)
    seen = np.zeros(len(hosts), bool)
    seen[start] = True
    frontier = np.array([start])
    while frontier.size:
        reach = hosts[frontier]
        new = np.flatnonzero(reach.any(axis=0) & (by < 0))
        if not new.size:
            break
        by[new] = frontier[reach[:, new].argmax(axis=0)]
        best = int(new[np.argmax(room[new])])
        if room[best] > 0:
            path = [(int(by[best]), best)]
            while path[-1][0] != start:
                back = int(at[path[-1][0]])
                path.append((int(by[back]), back))
            return path, frontier
        held = placed[:, new] > 0
        frontier = np.flatnonzero(held.any(axis=1) & ~seen)
        at[frontier] = new[held[frontier].argmax(axis=1)]
        seen[frontier] = True
    return [], np.flatnonzero(seen)


def _routed(counts: Ints, placed: Ints, rows: tuple[Ints, ...]) -> Ints:
    """Match sources to devices: own tokens, then per row in order, shape (m, D, D)."""
    own = np.minimum(counts, placed)
    found = np.zeros((*counts.shape, counts.shape[1]), np.int64)
    device = np.arange(counts.shape[1])
    found[:, device, device] = own
    sends, takes = counts - own, placed - own
    for part in rows:
        order = part[part >= 0]
        row = np.repeat(np.arange(len(part)), (part >= 0).sum(axis=1))
        start = np.r_[0, np.flatnonzero(np.diff(row)) + 1][row]
        sent, taken = (_ends(x[:, order], start) for x in (sends, takes))
        upper = np.minimum(sent[1][:, :, None], taken[1][:, None, :])
        lower = np.maximum(sent[0][:, :, None], taken[0][:, None, :])
        more = np.where(row[:, None] == row[None, :], np.maximum(upper - lower, 0), 0)
        found[:, order[:, None], order[None, :]] += more
        sends[:, order] -= more.sum(axis=2)
        takes[:, order] -= more.sum(axis=1)
    return found


def _ends(amounts: Ints, start: Ints) -> tuple[Ints, Ints]:
    """Where each amount begins and ends when those of its row are laid end to end."""
    upto = np.cumsum(amounts, axis=1)
    before = upto - amounts
    base = before[:, start]
    return before - base, upto - base
