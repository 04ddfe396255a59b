"""Layers with one expert's hosts varied: many candidates at once, tokens cut freely.

What a search needs between exact costs. Tokens are real numbers here and copies go in a chain, or
directly, so that a batch of candidates is a handful of array operations; the planner asks
``layer_times`` for the exact time of the few lendings that it ends up with.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from strategies.expert.expert_cost import Products, expert_s
from strategies.expert.layer_cost import LayerCosts, nodes_of
from strategies.expert.spread_links import soft_max, wires_of
from strategies.expert.spreading import node_rows

__all__ = ["Trials", "Varied"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

SOFT = 0.3
"""Weight of the soft maximum in a candidate's score: relieving one of two equally full devices must
count for something."""


_NO_CAP = 1e30
"""Tokens that no device ever sees."""


class Trials(msgspec.Struct, frozen=True, eq=False):
    """Candidates for one expert's hosts.

    Args:
        rows: hosts, shape (K, D). seconds: of the layer [s], shape (K,).
        score: seconds and a share of what it would be if not only the fullest counted, shape (K,).
        sent: the expert's tokens from source to device, shape (K, S, D).
        busy: [s] of the expert forward and backward on each device, shape (2, K, D).
        carried: copies of the expert over each link, shape (K, X).
    """

    rows: Bools
    seconds: Floats
    score: Floats
    sent: Floats
    busy: Floats
    carried: Floats


class Varied:
    """A layer under search, at first without any lent expert.

    Attributes:
        hosts: devices that hold each expert, shape (E, D).
        work: tokens of each expert on each device, shape (E, D).
        seconds: of the layer [s], inf before the first candidate is taken.
    """

    def __init__(
        self, counts: Ints, costs: LayerCosts, home: Ints, scheduled: bool, near: bool
    ) -> None:
        num_experts, size = counts.shape
        nodes = nodes_of(costs)
        node = np.zeros(size, np.int64) if nodes is None else nodes
        self.costs, self.scheduled, self.keeps = costs, scheduled, near
        self.counts, self.home = counts.astype(np.float64), home
        self.node = np.unique(node, return_inverse=True)[1]
        self.inside = (self.node[:, None] == np.arange(self.node.max() + 1)).astype(np.float64)
        self.near = self.node[:, None] == self.node[None, :]
        self.rows = node_rows(self.node)
        row, column = np.nonzero(self.rows >= 0)
        self.place = np.zeros((2, size), np.int64)
        self.place[:, self.rows[row, column]] = row, column
        self.experts = costs.experts
        if isinstance(costs.experts, Products):
            none = np.zeros(size)
            self.experts = msgspec.structs.replace(
                costs.experts, start_forward=none, start_backward=none
            )
        self.hosts = home[:, None] == np.arange(size)
        self.work = np.where(self.hosts, self.counts.sum(axis=1)[:, None], 0.0)
        received = np.zeros((size, size))
        np.add.at(received, home, self.counts)
        self.sent = received.T
        self.busy = np.array(expert_s(self.experts, self.work[:, None, :]))
        self.mean = float(counts.sum()) / size
        self.wires = wires_of(costs)
        self.carried = np.zeros((num_experts, self.wires.carried(0, self.hosts[:1]).shape[1]))
        self._own: dict[int, Floats] = {}
        self.seconds = np.inf

    def fullest(self) -> int:
        """The device whose experts take longest."""
        return int(np.argmax(self.busy[0].sum(axis=0)))

    def without(self, expert: int) -> Floats:
        """Load of each device from all other experts, shape (D,)."""
        return np.asarray(self.work.sum(axis=0) - self.work[expert], np.float64)

    def received(self) -> Floats:
        """Tokens of each expert that the node receiving most gets from others, shape (E,).

        With one node, or one device per node: the device receiving most.
        """
        group = np.eye(len(self.node)) if self.inside.shape[1] == 1 else self.inside
        into = self.sent @ group
        most = group[:, int(np.argmax(into.sum(axis=0) - (into * group).sum(axis=0)))]
        found = np.where(most[self.home] > 0, self.counts @ (1.0 - most), 0.0)
        for expert, sent in self._own.items():
            found[expert] = (1.0 - most) @ sent @ most
        return np.asarray(found, np.float64)

    def travelling(self) -> Floats:
        """Tokens of each expert that leave their source, shape (E,)."""
        number = np.arange(len(self.node))
        stays = self.counts[np.arange(len(self.home)), self.home]
        for expert, sent in self._own.items():
            stays[expert] = sent[number, number].sum()
        return np.asarray(self.counts.sum(axis=1) - stays, np.float64)

    def tried(self, expert: int, rows: Bools) -> Trials:
        """Price hosts for one expert.

        Args:
            expert: whose hosts vary. rows: hosts, home among them, shape (K, D).
        """
        rest, counts = self.without(expert), self.counts[expert]
        cap = np.full((len(rows), 1), _NO_CAP)
        if not self.keeps:
            level = np.where(rows, rest, np.inf)
            poured = _poured(np.full(len(rows), counts.sum()), level)
            full = np.where(poured > 0.0, level + poured, 0.0).max(axis=1)
            cap[:, 0] = np.maximum(full, self.mean)
        share = self._near(counts, rows, rest, cap)
        sent = self._matched(counts, share)
        busy = np.array(expert_s(self.experts, share[:, None, :]))
        carried = self.wires.carried(int(self.home[expert]), rows)
        seconds, score = self._seconds(expert, sent, busy, carried)
        return Trials(rows, seconds, score, sent, busy, carried)

    def take(self, expert: int, trials: Trials, which: int) -> None:
        """Give the expert the hosts of one candidate."""
        self.sent = self.sent + trials.sent[which] - self._sent_of(expert)
        self.hosts[expert] = trials.rows[which]
        self.work[expert] = trials.sent[which].sum(axis=0)
        self.busy[:, expert] = trials.busy[:, which]
        self.carried[expert] = trials.carried[which]
        self._own[expert] = trials.sent[which]
        self.seconds = float(trials.seconds[which])

    def _sent_of(self, expert: int) -> Floats:
        if expert in self._own:
            return self._own[expert]
        sent = np.zeros_like(self.sent)
        sent[:, self.home[expert]] = self.counts[expert]
        return sent

    def _near(self, counts: Floats, rows: Bools, rest: Floats, cap: Floats) -> Floats:
        """Tokens of the expert on each device, near their sources up to a cap, shape (K, D).

        Own tokens stay; a node's others are poured over its hosts; the rest over all hosts.
        """
        share = np.where(rows, np.clip(cap - rest, 0.0, counts), 0.0)
        left = (counts - share) @ self.inside
        if self.rows.shape[1] > 1:
            level = np.where(rows, rest + share, np.inf)
            level = np.concatenate([level, np.full((len(rows), 1), np.inf)], axis=1)[:, self.rows]
            need = np.where(np.isfinite(level).any(axis=2), left, 0.0)
            more = _poured(need.ravel(), level.reshape(-1, level.shape[2])).reshape(level.shape)
            more = np.clip(more, 0.0, np.maximum(cap[:, :, None] - level, 0.0))
            share += more[:, self.place[0], self.place[1]]
            left -= more.sum(axis=2)
        need = np.maximum(left, 0.0).sum(axis=1)
        return share + _poured(need, np.where(rows, rest + share, np.inf))

    def _matched(self, counts: Floats, share: Floats) -> Floats:
        """Tokens from source to device: own ones, then within nodes, then any; in proportion."""
        own = np.minimum(counts, share)
        gives, takes = counts - own, share - own
        given, taken = gives @ self.inside, takes @ self.inside
        both = np.minimum(given, taken)
        part = np.divide(both, given * taken, out=np.zeros_like(both), where=both > 0)
        part = part[:, self.node]
        sent = np.where(self.near, (gives * part)[:, :, None] * takes[:, None, :], 0.0)
        size = len(counts)
        sent[:, np.arange(size), np.arange(size)] += own
        gives = gives - gives * part * taken[:, self.node]
        takes = takes - takes * part * given[:, self.node]
        total = gives.sum(axis=1)
        scale = np.divide(1.0, total, out=np.zeros_like(total), where=total > 1e-9)
        return np.asarray(sent + (gives * scale[:, None])[:, :, None] * takes[:, None, :])

    def _seconds(
        self, expert: int, sent: Floats, busy: Floats, carried: Floats
    ) -> tuple[Floats, Floats]:
        """Time of the layer and its score, shapes (K,)."""
        costs = self.costs
        forward, backward = (self.busy.sum(axis=1) - self.busy[:, expert])[:, None] + busy
        fec, bec = forward.max(axis=1), backward.max(axis=1)
        tokens = (self.sent - self._sent_of(expert) + sent) * costs.token_bytes
        exchange, soft = self.wires.exchanged(tokens)
        others = self.carried.sum(axis=0) - self.carried[expert]
        trans, agg = self.wires.copied(others + carried)
        if self.scheduled:
            trans = np.maximum(trans - fec - costs.fnec_s, 0.0)
            agg = np.maximum(agg - bec - costs.bnec_s, 0.0)
        each = 4.0 * costs.exchange_factor
        seconds = each * exchange + fec + bec + trans + agg
        soft = each * soft + soft_max(forward) + soft_max(backward) + trans + agg
        return seconds, seconds + SOFT * soft


def _poured(need: Floats, level: Floats) -> Floats:
    """What is poured on each place, shape (K, C), so that the emptiest rise to one level.

    Args:
        need: to pour, shape (K,). level: before, inf where nothing may stand, shape (K, C).
    """
    rising = np.sort(level, axis=1)
    open_ = np.isfinite(rising)
    total = np.cumsum(np.where(open_, rising, 0.0), axis=1)
    mean = (need[:, None] + total) / np.arange(1, level.shape[1] + 1)
    reached = np.where(open_, mean, np.inf).min(axis=1)
    usable = np.isfinite(level) & np.isfinite(reached)[:, None]
    return np.where(usable, np.maximum(reached[:, None] - np.where(usable, level, 0.0), 0.0), 0.0)
