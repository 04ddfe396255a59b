"""Time of one MoE layer under a lending: exchanges, experts, parameter copies, gradient sums.

Pro-Prophet's cost model (arXiv:2411.10003, eq. 1 to 8) over two pricings of the links and two of
the experts' work. Contention between the operations is left to the engine.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from strategies.expert.expert_cost import ExpertTimes, PerToken, Products, expert_s, products
from strategies.expert.journeys import copies_s, journey_s, tokens_back, tokens_out
from strategies.expert.lending import Lending, Shares, copies, shares
from strategies.expert.link_cost import Links, MeanBandwidth, Topology, exchange_s, topology

__all__ = [
    "LayerCosts",
    "LayerTimes",
    "MeanBandwidth",
    "PerToken",
    "Products",
    "Topology",
    "blocking_s",
    "copy_bytes",
    "costs_from_plain",
    "costs_to_plain",
    "exchange_s",
    "expert_s",
    "layer_times",
    "least_s",
    "nodes_of",
    "predicted_of",
    "products",
    "released",
    "scheduled_s",
    "times_of",
    "topology",
    "transfer_s",
]

Floats = NDArray[np.float64]
_GBIT = 1e9 / 8


class LayerCosts(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What decides the time of a layer.

    Args:
        token_bytes: [B] of a token's activation on the wire.
        experts: time of the experts' work. links: time of exchanges.
        param_bytes, gradient_bytes: [B] of one expert's parameters and gradients, P_e and G_e.
        exchange_factor: on the time of exchanging tokens, an accelerator's ``ep_cost``.
        fnec_s, bnec_s: [s] forward and backward of the block's other layer, T_FNEC and T_BNEC.
        plan_s: [s] that making a plan for one layer takes.
    """

    token_bytes: float
    experts: ExpertTimes
    links: Links
    param_bytes: float
    gradient_bytes: float
    exchange_factor: float = 1.0
    fnec_s: float = 0.0
    bnec_s: float = 0.0
    plan_s: float = 0.0


class LayerTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one layer's parts [s].

    Args:
        dispatch, combine: one exchange to the experts, one back; a step has two of each.
        fec, bec: forward and backward of the fullest device's experts.
        trans, agg: parameters to the hosts, gradients back.
    """

    dispatch: float
    combine: float
    fec: float
    bec: float
    trans: float
    agg: float

    @property
    def a2a(self) -> float:
        """Mean of the four exchanges [s]."""
        return (self.dispatch + self.combine) / 2


def nodes_of(costs: LayerCosts) -> NDArray[np.int64] | None:
    """Return the node of each device, or None where the pricing knows no nodes."""
    return costs.links.nodes if isinstance(costs.links, Topology) else None


def layer_times(costs: LayerCosts, counts: ArrayLike, lending: Lending) -> LayerTimes:
    """Return the times of a layer's parts.

    Args:
        costs: of the layer. counts: tokens of each expert from each source, shape (E, S).
        lending: where the experts are.

    Raises:
        InputError: counts that do not fit.
    """
    return times_of(costs, shares(counts, lending, nodes_of(costs)), lending)


def times_of(costs: LayerCosts, placed: Shares, lending: Lending) -> LayerTimes:
    """Return the times of a layer's parts for tokens that are already placed."""
    forward, backward = expert_s(costs.experts, placed.work)
    nbytes = placed.sent * costs.token_bytes
    dispatch = journey_s(costs.links, tokens_out(costs.links, nbytes))
    combine = journey_s(costs.links, tokens_back(costs.links, nbytes))
    trans, agg = transfer_s(costs, lending)
    return LayerTimes(
        dispatch=dispatch * costs.exchange_factor,
        combine=combine * costs.exchange_factor,
        fec=float(forward.max()),
        bec=float(backward.max()),
        trans=trans,
        agg=agg,
    )


def transfer_s(costs: LayerCosts, lending: Lending) -> tuple[float, float]:
    """Return the times of parameters out and gradients back [s]; eq. 4 and 5, any sets of hosts."""
    number = lending.hosts.sum(axis=1)
    if not (number > 1).any():
        return 0.0, 0.0
    if isinstance(costs.links, MeanBandwidth):
        held = float(number[number > 1].sum()) / lending.hosts.shape[1]
        return (
            held * costs.param_bytes / costs.links.trans,
            held * costs.gradient_bytes / costs.links.agg,
        )
    return copies_s(costs.links, lending, costs.param_bytes, costs.gradient_bytes)


def blocking_s(times: LayerTimes) -> float:
    """Return the time of a layer whose copies and sums nothing hides [s] (eq. 6)."""
    return 2 * (times.dispatch + times.combine) + times.fec + times.bec + times.trans + times.agg


def scheduled_s(costs: LayerCosts, times: LayerTimes) -> float:
    """Return the time of a layer whose copies and sums pass under the neighbours' work [s] (eq. 8).

    Copies under FEC and FNEC, sums under BEC and BNEC, as if the neighbour's experts took as long
    as this layer's.
    """
    trans = max(0.0, times.trans - times.fec - costs.fnec_s)
    agg = max(0.0, times.agg - times.bec - costs.bnec_s)
    return 2 * (times.dispatch + times.combine) + times.fec + times.bec + trans + agg


def predicted_of(costs: LayerCosts, times: LayerTimes, scheduled: bool = True) -> float:
    """Return the time of a layer [s] of eq. 8, or where nothing is scheduled of eq. 6."""
    return scheduled_s(costs, times) if scheduled else blocking_s(times)


def least_s(costs: LayerCosts, counts: ArrayLike) -> float:
    """Return what no lending can beat [s]: experts evenly spread, nothing on the links.

    An expert in parts takes no less time than whole, so the mean over devices of whole experts,
    each on its quickest device, is a bound on the fullest device.

    Args:
        costs: of the layer. counts: tokens of each expert from each source, shape (E, S).
    """
    amount = np.asarray(counts)
    size = amount.shape[1]
    whole = np.broadcast_to(amount.sum(axis=1)[:, None, None], (len(amount), 1, size))
    return float(sum(part.min(axis=-1).sum() / size for part in expert_s(costs.experts, whole)))


def copy_bytes(costs: LayerCosts, lending: Lending) -> Floats:
    """Return what the parameters and gradients of lent experts take on each device [B], (D,)."""
    return np.asarray(copies(lending) * (costs.param_bytes + costs.gradient_bytes), np.float64)


def released(
    width: int, hidden: int, num_devices: int, *, sequences: int = 64, length: int = 256
) -> LayerCosts:
    """Return the costs of Pro-Prophet's released planner (its repository, commit 1d1fd11).

    15 Gb/s for parameters and gradients; 6, 16, 42 and 100 Gb/s for exchanges of up to 128 KiB, 256
    KiB, 1 MiB and above; FP32; 35.7e12 FLOP/s, into which its code multiplies the element size.

    Args:
        width, hidden: of the model and of an expert. num_devices: D.
        sequences, length: global batch and sequence length [tokens].
    """
    per_flop = 4.0 / 35.7e12
    own = sequences / num_devices
    dense = (2 * own * length**2 * width * 2 + 4 * own * length * width**2) * per_flop
    each = 4.0 * width * hidden * per_flop
    size = 2.0 * width * hidden * 4.0
    kib = 1024.0
    steps = ((128 * kib, 6), (256 * kib, 16), (1024 * kib, 42), (float(1 << 62), 100))
    return LayerCosts(
        token_bytes=4.0 * width,
        experts=PerToken(forward=each, backward=2.0 * each),
        links=MeanBandwidth(
            exchange=tuple((size, rate * _GBIT) for size, rate in steps),
            trans=15 * _GBIT,
            agg=15 * _GBIT,
        ),
        param_bytes=size,
        gradient_bytes=size,
        fnec_s=dense,
        bnec_s=2.0 * dense,
    )


def costs_to_plain(costs: LayerCosts) -> dict[str, Any]:
    """Return the costs as JSON-like data."""
    found: dict[str, Any] = msgspec.to_builtins(costs, enc_hook=lambda array: array.tolist())
    return found


def costs_from_plain(plain: dict[str, Any]) -> LayerCosts:
    """Return the costs that :func:`costs_to_plain` wrote.

    Raises:
        msgspec.ValidationError: data of another form.
    """
    return msgspec.convert(plain, LayerCosts, dec_hook=_array)


def _array(kind: type, value: Any) -> NDArray[Any]:
    dtype = np.int64 if "int64" in str(kind) else np.float64
    return np.array(value, dtype)
