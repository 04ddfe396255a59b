"""What splitting does to the amounts of blocks: work, parameters, kept activations, boundaries.

Scalars for one block, and ``BlockTable``: the same per block as arrays, so that a search sums any
range of blocks with two look-ups. Model FLOPs throughout: a product costs 2 m n k, a causal score
matrix half of the full one, a token's routed products top_k times; the backward pass is twice the
forward.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sim.errors import InputError
from sim.model.count import block_flops
from sim.model.graph import Block, Model
from sim.spec.job import DTYPE_BYTES, Recompute

__all__ = [
    "BlockTable",
    "RankGemm",
    "attention_flops",
    "backward_flops",
    "block_table",
    "dtype_bytes",
    "forward_flops",
    "input_elements",
    "output_elements",
    "rank_gemms",
    "rank_params",
    "saved_bytes",
]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

RankGemm = tuple[float, float, float, float]
"""(m, n, k, count): what one rank multiplies, count times."""


def dtype_bytes(dtype: str) -> int:
    """Return the bytes of one stored element [B].

    Raises:
        InputError: the dtype is unknown.
    """
    if dtype not in DTYPE_BYTES:
        raise InputError(
            "unknown dtype", key="dtype", found=dtype, expected=" ".join(sorted(DTYPE_BYTES))
        )
    return DTYPE_BYTES[dtype]


def forward_flops(block: Block, tokens: float, sequence_length: int) -> float:
    """Return the forward work of a block [FLOP] for ``tokens`` of sequences of this length."""
    return block_flops(block, tokens, sequence_length)


def attention_flops(block: Block, tokens: float, sequence_length: int) -> float:
    """Return the part of ``forward_flops`` that the score and value products are [FLOP]."""
    a = block.attention
    if a is None:
        return 0.0
    keys = sequence_length / 2 if a.causal else sequence_length
    return 2.0 * tokens * keys * a.heads * (a.head_dim + a.v_head_dim)


def backward_flops(block: Block, tokens: float, sequence_length: int) -> tuple[float, float]:
    """Return the backward work as (input gradient, weight gradient) [FLOP].

    A product has one of each, as large as itself. The attention core has no weights, so both its
    backward products belong to the input gradient. The two sum to twice the forward.
    """
    core = attention_flops(block, tokens, sequence_length)
    products = forward_flops(block, tokens, sequence_length) - core
    return products + 2.0 * core, products


def rank_gemms(
    block: Block, tokens: float, tp: int = 1, ep: int = 1, sequence_parallel: bool = False
) -> tuple[RankGemm, ...]:
    """Return the products of one rank's forward pass.

    Column products divide n by tp, row products k. Unsplit products are repeated on every rank,
    under sequence parallelism each on its own tokens. Routed products run once per local expert on
    its balanced share of the tokens of all ep ranks.

    Args:
        block: what. tokens: of the microbatch on this rank's tensor-parallel group.
        tp, ep: sizes. sequence_parallel: the rest of the activations is split too.
    """
    found = []
    for g in block.gemms:
        m, n, k, count = float(tokens), float(g.n), float(g.k), float(g.count)
        if g.routed:
            m = tokens * block.top_k * ep / block.num_experts
            count *= block.num_experts / ep
        if g.split == "column":
            n /= tp
        elif g.split == "row":
            k /= tp
        elif sequence_parallel:
            m /= tp
        found.append((m, n, k, count))
    return tuple(found)


def rank_params(blocks: Iterable[Block], tp: int = 1, ep: int = 1) -> tuple[float, float]:
    """Return the parameters of blocks on one rank as (dense, experts); a shared one counts once."""
    dense = experts = 0.0
    seen: set[str] = set()
    for block in blocks:
        if not block.shares or block.shares not in seen:
            dense += block.params / tp
        seen.add(block.shares)
        dense += block.params_replicated
        experts += block.params_experts / (ep * tp)
    return dense, experts


def saved_bytes(
    block: Block,
    tokens: float,
    sequence_length: int,
    element_bytes: float,
    *,
    tp: int = 1,
    sequence_parallel: bool = False,
    recompute: Recompute = "none",
) -> float:
    """Return what one rank keeps of a block for its backward pass [B].

    "selective" drops the attention core (Korthikanti et al. 2022, section 5), "full" keeps the
    block's input only.

    Args:
        block: what. tokens: in the microbatch. sequence_length: [tokens] keys per query.
        element_bytes: [B] of an activation element. tp, sequence_parallel, recompute: as split.
    """
    whole_over = tp if sequence_parallel else 1
    if recompute == "full":
        return tokens * block.input_elements * element_bytes / whole_over
    split, whole, core_split, core_whole = _kept(block, sequence_length, element_bytes)
    if recompute == "none":
        split, whole = split + core_split, whole + core_whole
    return tokens * (split / tp + whole / whole_over)


def _kept(
    block: Block, sequence_length: int, element_bytes: float
) -> tuple[float, float, float, float]:
    """Kept bytes per token: outside the core (split, whole), in the core (split, whole)."""
    sums = [0.0, 0.0, 0.0, 0.0]
    for s in block.saved:
        size = s.elements * (s.nbytes or element_bytes)
        size *= (block.top_k if s.routed else 1) * (sequence_length if s.per_key else 1)
        sums[2 * s.core + (not s.split)] += size
    return sums[0], sums[1], sums[2], sums[3]


def output_elements(model: Model) -> Ints:
    """Return the largest edge out of every block [elements per token], shape (L,)."""
    found = dict.fromkeys((b.name for b in model.blocks), 0)
    for edge in model.edges:
        found[edge.src] = max(found[edge.src], edge.elements)
    return np.array([found[b.name] or b.input_elements for b in model.blocks], np.int64)


def input_elements(model: Model) -> Ints:
    """Return the input of every block [elements per token], shape (L,)."""
    return np.array([b.input_elements for b in model.blocks], np.int64)


class BlockTable:
    """Amounts of all blocks of a model for one sequence length and element size.

    Arrays have one entry per block, shape (L,); ranges of blocks are (first, last + 1).

    Attributes:
        layer: label. opens: True for the first block of a layer, whose input full recomputation
            keeps. in_layer: True for blocks that recomputation applies to.
        flops, core_flops: [FLOP] forward per token, all and of the attention core.
        params, params_replicated, params_experts: counts. params_expert: of one expert.
        kept_split, kept_whole, core_split, core_whole: [B] kept per token, divided by tp or only by
            sequence parallelism, outside and inside the attention core.
        input_bytes: [B] per token. logits_elements: per token.
        tied: (first, second, params) of blocks that share a parameter.
    """

    def __init__(self, model: Model, sequence_length: int, element_bytes: float) -> None:
        blocks = model.blocks
        self.sequence_length, self.element_bytes = sequence_length, element_bytes
        self.layer = np.array([b.layer for b in blocks], np.int64)
        self.in_layer = (self.layer >= 0) & (self.layer < max(model.num_layers, 1))
        self.opens = np.append(True, self.layer[1:] != self.layer[:-1]) & self.in_layer
        self.flops = _floats(forward_flops(b, 1.0, sequence_length) for b in blocks)
        self.core_flops = _floats(attention_flops(b, 1.0, sequence_length) for b in blocks)
        self.params = _floats(b.params for b in blocks)
        self.params_replicated = _floats(b.params_replicated for b in blocks)
        self.params_experts = _floats(b.params_experts for b in blocks)
        self.params_expert = _floats(b.params_experts / max(b.num_experts, 1) for b in blocks)
        kept = np.array([_kept(b, sequence_length, element_bytes) for b in blocks]).reshape(-1, 4)
        self.kept_split, self.kept_whole, self.core_split, self.core_whole = kept.T
        self.input_bytes = _floats(b.input_elements * element_bytes for b in blocks)
        self.logits_elements = _floats(b.logits_elements for b in blocks)
        self.tied = _tied(blocks)
        self._sums: dict[str, Floats] = {}

    def total(self, name: str, first: ArrayLike, last: ArrayLike) -> Floats:
        """Return the sum of an array over ranges of blocks; first, last and result of one shape."""
        sums = self._sums.get(name)
        if sums is None:
            sums = self._sums[name] = np.append(0.0, np.cumsum(getattr(self, name)))
        return np.asarray(sums[np.asarray(last)] - sums[np.asarray(first)])

    def rank_params(
        self, first: ArrayLike, last: ArrayLike, tp: ArrayLike = 1, ep: ArrayLike = 1
    ) -> tuple[Floats, Floats]:
        """Return (dense, experts) parameters per rank of ranges; a shared one counts once a range.

        Args:
            first, last, tp, ep: arrays that broadcast together.
        """
        low, high, tp = np.asarray(first), np.asarray(last), np.asarray(tp)
        dense = self.total("params", low, high)
        for a, b, params in self.tied:
            dense = dense - params * ((low <= a) & (b < high))
        dense = dense / tp + self.total("params_replicated", low, high)
        return dense, self.total("params_experts", low, high) / (np.asarray(ep) * tp)

    def kept_per_token(
        self,
        first: ArrayLike,
        last: ArrayLike,
        recompute: Recompute,
        tp: ArrayLike = 1,
        sequence_parallel: bool = False,
    ) -> Floats:
        """Return what ranges of blocks keep per token and rank [B].

        Blocks outside the layers (embedding, head) are never recomputed. Under "full" a layer keeps
        its input once, or its share of it that a range cut inside the layer begins with.
        """
        low, high, tp = np.asarray(first), np.asarray(last), np.asarray(tp, dtype=np.float64)
        rest = tp if sequence_parallel else np.ones_like(tp)
        if recompute == "full":
            outside = self.total("_outside_split", low, high) / tp
            outside = outside + self.total("_outside_whole", low, high) / rest
            inner = np.where(self.in_layer[low] & ~self.opens[low], self.input_bytes[low], 0.0)
            return np.asarray(outside + (self.total("_opening", low, high) + inner) / rest)
        kept = self.total("kept_split", low, high) / tp + self.total("kept_whole", low, high) / rest
        if recompute == "none":
            kept = kept + self.total("core_split", low, high) / tp
            kept = kept + self.total("core_whole", low, high) / rest
        return np.asarray(kept)

    @property
    def _outside_split(self) -> Floats:
        return np.where(self.in_layer, 0.0, self.kept_split + self.core_split)

    @property
    def _outside_whole(self) -> Floats:
        return np.where(self.in_layer, 0.0, self.kept_whole + self.core_whole)

    @property
    def _opening(self) -> Floats:
        return np.where(self.opens, self.input_bytes, 0.0)


def _floats(values: object) -> Floats:
    return np.array(list(values), np.float64)  # type: ignore[call-overload]


def _tied(blocks: tuple[Block, ...]) -> tuple[tuple[int, int, int], ...]:
    """Pairs of neighbouring holders: a range with n holders contains n - 1 of them."""
    holder: dict[str, int] = {}
    found = []
    for i, block in enumerate(blocks):
        if block.shares in holder:
            found.append((holder[block.shares], i, block.params))
        if block.shares:
            holder[block.shares] = i
    return tuple(found)


@lru_cache(maxsize=32)
def block_table(model: Model, sequence_length: int, element_bytes: float) -> BlockTable:
    """Build the table of a model, kept for the models asked last.

    Args:
        model: what. sequence_length: [tokens]. element_bytes: [B] of an activation element.
    """
    return BlockTable(model, sequence_length, element_bytes)
