"""EPLB: redundant experts packed evenly onto devices (DeepSeek, github.com/deepseek-ai/EPLB).

Its three steps as its description has them; ties go to the lower index. It knows loads only: no
sources, no earlier places, no cost of moving. Who owns each expert is decided here, after it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from strategies.expert.layer_cost import LayerCosts, nodes_of
from strategies.expert.lending import Lending, copies, static

__all__ = ["eplb", "owned", "pack", "rebalance", "replicate"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def eplb(
    counts: Ints,
    costs: LayerCosts,
    budget: int,
    previous: Lending | None = None,
    *,
    groups: int = 0,
) -> Lending:
    """Return EPLB's placement with ``budget`` redundant experts per device.

    Hierarchical where equal nodes divide the groups, else global. Replicas of one expert on one
    device are one copy. Tokens are spread evenly. EPLB knows no owners; here every device owns as
    many experts as in plain expert parallelism, see :func:`owned`.

    Args:
        counts: tokens of each expert from each source, shape (E, S).
        costs: of the layer. budget: slots of each device beside those of its own experts.
        previous: the lending in use, whose homes stay where they can; None means plain expert
            parallelism.
        groups: expert groups that share a node; 0 makes each expert a group.
    """
    num_experts, num_devices = counts.shape
    old = static(num_experts, num_devices) if previous is None else previous
    slots = -(-num_experts // num_devices) + budget
    nodes = nodes_of(costs)
    number = 1
    order = np.arange(num_devices)
    if nodes is not None:
        sizes = np.unique(nodes, return_counts=True)[1]
        if np.unique(sizes).size == 1 and num_experts % (groups or num_experts) == 0:
            number, order = sizes.size, np.argsort(nodes, kind="stable")
    load = counts.sum(axis=1).astype(np.float64)
    placed = rebalance(load, slots * num_devices, groups or num_experts, number, num_devices)
    hosts = np.zeros((num_experts, num_devices), bool)
    hosts[placed, np.repeat(order, slots)] = True
    return owned(hosts, old.home, load, budget)


def owned(hosts: Bools, old: Ints, load: Floats, budget: int) -> Lending:
    """Return homes for a placement, as many on each device as in plain expert parallelism.

    A cheapest assignment: as few experts as can be get a home that is no host of theirs; then as
    few as can be leave their old home; then those without have least load. There may be no way
    without any: EPLB packs slots, so a device may hold more experts that are nowhere else than it
    can own. Such an expert gets a copy at its home, and where that device then has too many it
    gives up those with fewest tokens.

    Args:
        hosts: devices that hold each expert, at most ``budget`` more than they own, shape (E, D).
        old: home of each expert, shape (E,). load: tokens of each expert, shape (E,).
        budget: copies that a device has room for.
    """
    from scipy.optimize import linear_sum_assignment

    num_experts, num_devices = hosts.shape
    place = static(num_experts, num_devices).home
    strange = 2 * num_experts + load[:, None] / max(2 * float(load.sum()), 1.0)
    moved = (place != old[:, None]).astype(np.float64)
    home = place[linear_sum_assignment(np.where(hosts[:, place], 0.0, strange) + moved)[1]]
    held = hosts.copy()
    held[np.arange(num_experts), home] = True
    for device in np.flatnonzero(copies(Lending(hosts=held, home=home)) > budget):
        lent = np.flatnonzero(held[:, device] & (home != device))
        each = load[lent] / held[lent].sum(axis=1)
        held[lent[np.argsort(each, kind="stable")[: lent.size - budget]], device] = False
    return Lending(hosts=held, home=home, split="even")


def rebalance(
    load: Floats, num_slots: int, num_groups: int, num_nodes: int, num_devices: int
) -> Ints:
    """Return the expert in each slot, device after device, shape (num_slots,).

    Args:
        load: of each expert, shape (E,). num_slots: a multiple of the devices, at least E.
        num_groups: divides the experts. num_nodes: divides the devices; where it does not divide
            the groups, everything is one group on one node.
        num_devices: D.

    Raises:
        InputError: numbers that do not divide.
    """
    experts = load.size
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    if num_slots % num_devices or num_slots < experts or experts % num_groups:
        raise InputError(
            "experts do not fit the slots",
            key="slots",
            found=f"{experts} experts in {num_groups} groups, {num_slots} slots",
            expected=f"slots a multiple of {num_devices} and >= {experts}; groups divide experts",
        )
    size = experts // num_groups
    node_of = pack(load.reshape(num_groups, size).sum(axis=1), num_nodes)
    found = []
    for n in range(num_nodes):
        mine = np.flatnonzero(node_of == n)
        members = (mine[:, None] * size + np.arange(size)).ravel()
        chosen, number = replicate(load[members], num_slots // num_nodes)
        device = pack(load[members[chosen]] / number[chosen], num_devices // num_nodes)
        found.append(members[chosen][np.argsort(device, kind="stable")])
    return np.concatenate(found)


def replicate(load: Floats, num_slots: int) -> tuple[Ints, Ints]:
    """Add replicas one by one to the expert with the largest load per replica.

    Args:
        load: shape (n,). num_slots: >= n.

    Returns:
        (expert of each replica, the first n once each, shape (num_slots,); replicas, shape (n,)).
    """
    number = np.ones(load.size, np.int64)
    chosen = list(range(load.size))
    for _ in range(num_slots - load.size):
        e = int(np.argmax(load / number))
        chosen.append(e)
        number[e] += 1
    return np.array(chosen, np.int64), number


def pack(weight: Floats, num_packs: int) -> Ints:
    """Return the pack of each item: heaviest first into the lightest pack that has a place left.

    Every pack takes equally many; with one item each, item i goes to pack i.

    Args:
        weight: shape (n,), n a multiple of num_packs.
    """
    places = weight.size // num_packs
    if places == 1:
        return np.arange(weight.size)
    found = np.empty(weight.size, np.int64)
    filled, held = np.zeros(num_packs), np.zeros(num_packs, np.int64)
    for i in np.argsort(-weight, kind="stable"):
        p = int(np.argmin(np.where(held < places, filled, np.inf)))
        found[i] = p
        filled[p] += weight[i]
        held[p] += 1
    return found
