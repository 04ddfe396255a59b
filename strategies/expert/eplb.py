"""EPLB: redundant experts packed evenly onto devices (DeepSeek, github.com/deepseek-ai/EPLB).

Its three steps as its description has them; ties go to the lower index. It knows loads only: no
sources, no earlier places, no cost of moving.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from strategies.expert.layer_cost import LayerCosts, nodes_of
from strategies.expert.lending import Lending, static

__all__ = ["eplb", "pack", "rebalance", "replicate"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def eplb(counts: Ints, costs: LayerCosts, budget: int, *, groups: int = 0) -> Lending:
    """Return EPLB's placement with ``budget`` redundant experts per device.

    Hierarchical where equal nodes divide the groups, else global. Replicas of one expert on one
    device are one copy. An expert's home is its old one where it is still a host, else the host
    with fewest homes so far. Tokens are spread evenly.

    Args:
        counts: tokens of each expert from each source, shape (E, S).
        costs: of the layer. budget: slots of each device beside those of its own experts.
        groups: expert groups that share a node; 0 makes each expert a group.
    """
    num_experts, num_devices = counts.shape
    own = static(num_experts, num_devices).home
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
    home, owned = own.copy(), np.zeros(num_devices, np.int64)
    stays = hosts[np.arange(num_experts), own]
    owned += np.bincount(own[stays], minlength=num_devices)
    for e in np.flatnonzero(~stays):
        where = np.flatnonzero(hosts[e])
        home[e] = where[np.argmin(owned[where])]
        owned[home[e]] += 1
    return Lending(hosts=hosts, home=home, split="even")


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
