"""FasterMoE's dynamic shadowing: popular experts are copied to every device for one step.

He et al., PPoPP 2022. Two policies: of the prototype that the paper's artifact holds (which
Pro-Prophet extends), and of the later FastMoE release. Both know totals per expert and means only.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from strategies.expert.expert_cost import expert_s
from strategies.expert.journeys import copies_s
from strategies.expert.layer_cost import LayerCosts
from strategies.expert.lending import Lending, static
from strategies.expert.link_cost import MeanBandwidth, exchange_s

__all__ = ["ARTIFACT_FACTOR", "Means", "fastermoe", "fastermoe_release", "means"]

ARTIFACT_FACTOR = 4.0
"""The prototype multiplies the element size of FP32 into its compute time."""

Ints = NDArray[np.int64]


class Means(msgspec.Struct, frozen=True, kw_only=True):
    """What the policies know of the machine.

    Args:
        compute_s: [s] forward work of a token. send_s: [s] of one exchange per token of the fullest
            expert. model_s: [s] of sending one expert to all.
    """

    compute_s: float
    send_s: float
    model_s: float


def means(costs: LayerCosts, num_devices: int, load: float) -> Means:
    """Return the constants that one would set for these costs: measured at an even load.

    Args:
        costs: of the layer. num_devices: D. load: tokens per device.
    """
    tokens = max(load, 1.0)
    even = np.full((num_devices, num_devices), tokens / num_devices)
    forward, _ = expert_s(costs.experts, np.full((1, num_devices), tokens))
    if isinstance(costs.links, MeanBandwidth):
        send = costs.token_bytes / costs.links.exchange[-1][1]
        model = costs.param_bytes / costs.links.trans
    else:
        send = float(exchange_s(costs.links, even * costs.token_bytes)) / tokens
        one = Lending(hosts=np.ones((1, num_devices), bool), home=np.zeros(1, np.int64))
        model = copies_s(costs.links, one, costs.param_bytes, costs.param_bytes)[0]
    return Means(
        compute_s=float(forward.max()) / tokens,
        send_s=send * costs.exchange_factor,
        model_s=model,
    )


def fastermoe(
    counts: Ints, costs: LayerCosts, budget: int, *, factor: float = ARTIFACT_FACTOR
) -> Lending:
    """Shadow as the artifact's prototype does.

    Experts by falling load: each that is shadowed leaves its owner only its own tokens, and every
    device adds its own. The cost ``3 c max(load) + 2 i M`` leaves the exchanges out. The search
    ends when it first rises, and shadowing is used only where it is below ``3 c B + 4 m B`` of the
    unshadowed layer.

    Args:
        counts: tokens of each expert from each source, shape (E, S).
        costs: of the layer. budget: copies that each device has room for.
        factor: on the compute time; 1 where the costs hold it already.
    """
    num_experts, num_devices = counts.shape
    plain = static(num_experts, num_devices)
    total = counts.sum(axis=1)
    load = np.bincount(plain.home, total, num_devices)
    known = means(costs, num_devices, float(load.mean()))
    compute = factor * known.compute_s
    fullest = float(load.max())
    shadowed, last = 0, np.inf
    for i, expert in enumerate(_by_load(total)[:budget].tolist(), start=1):
        load = load + counts[expert]
        load[plain.home[expert]] -= total[expert]
        cost = 3.0 * compute * float(load.max()) + 2.0 * i * known.model_s
        if cost >= last:
            break
        shadowed, last = i, cost
    if last >= 3.0 * compute * fullest + 4.0 * known.send_s * fullest:
        return plain
    return _shadowing(plain, _by_load(total)[:shadowed])


def fastermoe_release(counts: Ints, costs: LayerCosts, budget: int) -> Lending:
    """Shadow as FastMoE's release does.

    It takes the next expert's load for the load that is left, leaves out the tokens that devices
    then compute themselves, and counts one transfer per expert: shadow the i hottest while
    ``(3 c + 4 m) B_(i+1) + i M`` falls.

    Args:
        counts: tokens of each expert from each source, shape (E, S).
        costs: of the layer. budget: copies that each device has room for.
    """
    num_experts, num_devices = counts.shape
    plain = static(num_experts, num_devices)
    total = counts.sum(axis=1)
    known = means(costs, num_devices, float(total.sum()) / num_devices)
    order = _by_load(total)
    falling = np.append(total[order], 0)
    each = 3.0 * known.compute_s + 4.0 * known.send_s
    base, shadowed = each * falling[0], 0
    for i in range(1, min(budget, num_experts) + 1):
        new = each * falling[i] + i * known.model_s
        if new >= base:
            break
        base, shadowed = new, i
    return _shadowing(plain, order[:shadowed])


def _by_load(total: Ints) -> Ints:
    """Experts by falling load, ties by index."""
    return np.argsort(-total, kind="stable")


def _shadowing(plain: Lending, experts: Ints) -> Lending:
    hosts = plain.hosts.copy()
    hosts[experts] = True
    return msgspec.structs.replace(plain, hosts=hosts)
