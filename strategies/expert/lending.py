"""Which devices hold which expert of one MoE layer, and where each token is then computed.

A lending copies an expert's parameters to further devices for one step and sums their gradients
back; routing is untouched, so the layer computes what it computed before (Pro-Prophet,
arXiv:2411.10003, section 3). E experts, D devices of one expert-parallel group, whose S = D ranks
are also the sources of tokens.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from sim.errors import InputError
from strategies.expert.routing_input import whole_total
from strategies.expert.spreading import balanced, even, local

__all__ = [
    "Lending",
    "Shares",
    "checked",
    "copies",
    "loads",
    "moved",
    "rehomed",
    "shares",
    "static",
    "tokens",
    "traffic",
]

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Split = Literal["local", "even", "balanced"]


class Lending(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Where the experts of one layer are during one step.

    Args:
        hosts: devices that hold each expert, its home among them, shape (E, D).
        home: device that owns each expert and its optimizer states, shape (E,).
        split: how a lent expert's tokens are shared out. "local": hosts compute their own tokens,
            all others go home. "even": each source spreads its tokens over the hosts, those of its
            node where there are any. "balanced": see ``slack``.
        slack: of "balanced". Tokens stay at their source, then in its node, as long as no device
            computes more than (1 + slack) times the mean; 0 makes the fullest device as empty as
            the hosts allow.
    """

    hosts: Bools
    home: Ints
    split: Split = "local"
    slack: float = 0.0


class Shares(msgspec.Struct, frozen=True, eq=False):
    """Where the tokens of a layer are computed, without telling experts' sources apart.

    Args:
        sent: tokens from source to device, the diagonal stays, shape (S, D).
        work: tokens of each expert on each device, shape (E, D).
    """

    sent: Ints
    work: Ints


def static(num_experts: int, num_devices: int) -> Lending:
    """Return plain expert parallelism: expert e lives on device ``e * D // E`` and nowhere else.

    Raises:
        InputError: no experts or no devices.
    """
    if num_experts < 1 or num_devices < 1:
        raise InputError(
            "a layer needs experts and devices",
            key="experts",
            found=f"{num_experts} experts on {num_devices} devices",
            expected="at least one of each",
        )
    home = np.arange(num_experts, dtype=np.int64) * num_devices // num_experts
    return Lending(hosts=home[:, None] == np.arange(num_devices), home=home)


def copies(lending: Lending) -> Ints:
    """Return how many experts each device holds that are not its own, shape (D,)."""
    held = lending.hosts.sum(axis=0)
    return np.asarray(held - np.bincount(lending.home, minlength=held.size), np.int64)


def checked(lending: Lending, budget: int | None = None) -> Lending:
    """Return the lending if it can be carried out.

    Args:
        lending: any. budget: most copies that a device has room for; None means no limit.

    Raises:
        InputError: arrays that do not fit each other, an expert that is not at home, an unknown
            split, or a device with more copies than the budget.
    """
    hosts, home = lending.hosts, lending.home
    if hosts.ndim != 2 or hosts.dtype != bool or home.shape != hosts.shape[:1]:
        raise InputError(
            "hosts and homes of a lending do not fit each other",
            key="hosts",
            found=f"{hosts.dtype} {hosts.shape} and {home.shape}",
            expected="bool (experts, devices) and (experts,)",
        )
    num_devices = hosts.shape[1]
    if home.size and (home.min() < 0 or home.max() >= num_devices):
        raise InputError(
            "an expert's home is no device of the group",
            key="home",
            found=str(home.tolist()),
            expected=f"0 to {num_devices - 1}",
        )
    absent = np.flatnonzero(~hosts[np.arange(home.size), home])
    if absent.size:
        raise InputError(
            f"expert {absent[0]} is not at home",
            key="hosts",
            found=str(np.flatnonzero(hosts[absent[0]]).tolist()),
            expected=f"device {home[absent[0]]} among them",
        )
    if lending.split not in ("local", "even", "balanced") or not lending.slack >= 0.0:
        raise InputError(
            "no such way to share out tokens",
            key="split",
            found=f"{lending.split}, slack {lending.slack}",
            expected="local, even or balanced, slack >= 0",
        )
    if budget is not None and (over := np.flatnonzero(copies(lending) > budget)).size:
        raise InputError(
            f"device {over[0]} has no room for its copies of experts",
            key="budget",
            found=str(copies(lending)[over[0]]),
            expected=f"at most {budget}",
        )
    return lending


def tokens(counts: ArrayLike, lending: Lending, nodes: ArrayLike | None = None) -> Ints:
    """Return the tokens of each expert from each source that each device computes.

    Sums over devices are the counts, exactly.

    Args:
        counts: tokens of each expert from each source, shape (E, S), S = D.
        lending: where the experts are.
        nodes: node of each device, shape (D,); None means that all are on one.

    Returns:
        Shape (E, S, D).

    Raises:
        InputError: counts that are negative or do not fit the lending.
    """
    amount, place = _counts(counts, lending), _nodes(nodes, lending)
    num_experts, num_devices = amount.shape
    found = np.zeros((num_experts, num_devices, num_devices), np.int64)
    experts, sources = np.arange(num_experts)[:, None], np.arange(num_devices)[None, :]
    found[experts, sources, lending.home[:, None]] = amount
    lent, spread = _lent(amount, lending, place)
    found[lent] = spread
    return found


def shares(counts: ArrayLike, lending: Lending, nodes: ArrayLike | None = None) -> Shares:
    """Return the sums of :func:`tokens` that costs need, without the large array.

    Args and errors as there.
    """
    amount, place = _counts(counts, lending), _nodes(nodes, lending)
    num_experts, num_devices = amount.shape
    lent, spread = _lent(amount, lending, place)
    at_home = np.ones(num_experts, bool)
    at_home[lent] = False
    received = np.zeros((num_devices, num_devices), np.int64)
    np.add.at(received, lending.home[at_home], amount[at_home])
    work = np.zeros((num_experts, num_devices), np.int64)
    work[np.arange(num_experts), lending.home] = amount.sum(axis=1)
    work[lent] = spread.sum(axis=1)
    return Shares(sent=received.T + spread.sum(axis=0), work=work)


def loads(placed: Ints) -> Ints:
    """Return the tokens that each device computes, shape (D,), of :func:`tokens`."""
    return np.asarray(placed.sum(axis=(0, 1)), np.int64)


def traffic(placed: Ints) -> Ints:
    """Return the tokens that travel from source to device, shape (S, D), of :func:`tokens`."""
    sent = np.asarray(placed.sum(axis=0), np.int64)
    np.fill_diagonal(sent, 0)
    return sent


def moved(lending: Lending) -> Ints:
    """Return how many copies of experts each home sends to each host, shape (D, D)."""
    num_devices = lending.hosts.shape[1]
    sent = np.zeros((num_devices, num_devices), np.int64)
    lent = np.flatnonzero(lending.hosts.sum(axis=1) > 1)
    np.add.at(sent, lending.home[lent], lending.hosts[lent])
    np.fill_diagonal(sent, 0)
    return sent


def rehomed(before: Lending, after: Lending) -> Ints:
    """Return how many experts change their home from one device to another, shape (D, D).

    Those take their optimizer states along; an expert that is only lent does not.
    """
    num_devices = before.hosts.shape[1]
    sent = np.zeros((num_devices, num_devices), np.int64)
    np.add.at(sent, (before.home, after.home), 1)
    np.fill_diagonal(sent, 0)
    return sent


def _counts(counts: ArrayLike, lending: Lending) -> Ints:
    amount = np.asarray(counts)
    if amount.shape != lending.hosts.shape:
        raise InputError(
            "routing counts do not fit the lending",
            key="counts",
            found=str(amount.shape),
            expected=f"(experts, sources) {lending.hosts.shape}",
        )
    if amount.dtype.kind not in "iu" or (amount.size and amount.min() < 0):
        raise InputError(
            "routing counts must be whole numbers",
            key="counts",
            found=f"{amount.dtype}, smallest {amount.min() if amount.size else 0}",
            expected="integers >= 0",
        )
    whole_total(amount)
    return amount.astype(np.int64, copy=False)


def _nodes(nodes: ArrayLike | None, lending: Lending) -> Ints:
    num_devices = lending.hosts.shape[1]
    place = np.zeros(num_devices, np.int64) if nodes is None else np.asarray(nodes, np.int64)
    if place.shape != (num_devices,):
        raise InputError(
            "nodes do not fit the lending",
            key="nodes",
            found=str(place.shape),
            expected=f"one node for each of {num_devices} devices",
        )
    return place


def _lent(amount: Ints, lending: Lending, place: Ints) -> tuple[Ints, Ints]:
    """Experts on more than one device, and their tokens, shape (lent, S, D)."""
    lent = np.flatnonzero(lending.hosts.sum(axis=1) > 1)
    hosts, home, of = lending.hosts[lent], lending.home[lent], amount[lent]
    if not lent.size:
        return lent, np.zeros((0, *lending.hosts.shape[1:] * 2), np.int64)
    if lending.split == "local":
        return lent, local(of, hosts, home)
    if lending.split == "even":
        return lent, even(of, hosts, place)
    others = np.ones(amount.shape[0], bool)
    others[lent] = False
    rest = np.zeros(amount.shape[1], np.int64)
    np.add.at(rest, lending.home[others], amount[others].sum(axis=1))
    return lent, balanced(of, hosts, rest, place, lending.slack)
