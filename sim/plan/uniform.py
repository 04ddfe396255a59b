"""Drafts of meshes: the same cell everywhere, with every illegal size refused by name."""

from __future__ import annotations

from collections.abc import Sequence

from sim.errors import InputError
from sim.model.graph import Model
from sim.plan.draft import (
    CellKnobs,
    DataKnobs,
    ExpertKnobs,
    PipelineKnobs,
    PlanDraft,
    TensorKnobs,
    split_layers,
)
from sim.plan.placement import Recompute

__all__ = ["check_batch", "check_layers", "check_sizes", "layer_cuts", "uniform"]


def check_batch(global_batch: int, microbatch: int, dp: int, model_parallel: int = 1) -> int:
    """Microbatches per replica.

    Args:
        global_batch, microbatch: [sequences]. dp: replicas.
        model_parallel: chips per replica, to offer a legal number of chips.

    Raises:
        InputError: the batch is not a multiple of microbatch x dp; offers the nearest legal values.
    """
    unit = microbatch * dp
    if global_batch % unit == 0:
        return global_batch // unit
    offers = [f"{k * unit} (m={k})" for k in (global_batch // unit, global_batch // unit + 1) if k]
    legal = [d for d in range(dp, 0, -1) if global_batch % (microbatch * d) == 0]
    text = "global batch " + " or ".join(offers)
    if legal:
        d = legal[0]
        text += f", or {d * model_parallel} chips (dp={d}, m={global_batch // (microbatch * d)})"
    raise InputError(
        f"the global batch is not a multiple of microbatch x dp = {microbatch} x {dp}",
        key="job.global_batch",
        found=f"{global_batch} with dp={dp}",
        expected=text,
    )


def check_layers(num_layers: int, layers: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """Layers per virtual stage, as given, proved to place every layer once.

    Raises:
        InputError: the counts contradict the model or the number of stages.
    """
    if len(layers) != num_stages or sum(layers) != num_layers or min(layers) < 1:
        raise InputError(
            "layers per stage must place every layer of the model once",
            key="pipeline.layers",
            found=f"{'+'.join(map(str, layers))} = {sum(layers)} layers on {len(layers)} stages",
            expected=f"{num_layers} layers on {num_stages} stages, e.g. "
            + "+".join(map(str, split_layers(num_layers, num_stages))),
        )
    return tuple(layers)


def check_sizes(num_chips: int, sizes: dict[str, int]) -> int:
    """Replicas that this many chips make with these sizes.

    Args:
        num_chips: to use, all of them. sizes: pp, tp, cp and further knobs that must be positive.

    Raises:
        InputError: a size is not positive, or the chips are no multiple of pp x tp x cp.
    """
    for key, value in sizes.items():
        if value < 1:
            raise InputError(
                f"{key} must be positive", key=key, found=str(value), expected="at least 1"
            )
    pp, tp, cp = sizes["pp"], sizes["tp"], sizes["cp"]
    shape = pp * tp * cp
    if not num_chips or num_chips % shape:
        low = num_chips // shape * shape
        raise InputError(
            "the number of chips is not a multiple of pp x tp x cp",
            key="chips",
            found=f"{num_chips} chips for {pp} x {tp} x {cp}",
            expected=f"{low} or {low + shape}" if low else f"{shape}",
        )
    return num_chips // shape


def layer_cuts(model: Model, layers: Sequence[int]) -> tuple[int, ...]:
    """Block index where each virtual stage starts, and the number of blocks.

    Blocks before the first layer go with the first stage, blocks after the last with the last.
    """
    edges = [0]
    done = 0
    for count in layers[:-1]:
        done += count
        edges.append(next(i for i, b in enumerate(model.blocks) if b.layer >= done))
    return (*edges, len(model.blocks))


def uniform(
    model: Model,
    global_batch: int,
    chips: Sequence[int],
    *,
    pp: int = 1,
    tp: int = 1,
    cp: int = 1,
    ep: int = 1,
    microbatch: int = 1,
    schedule: str = "1f1b",
    chunks: int = 1,
    layers: Sequence[int] | None = None,
    recompute: Recompute = "none",
    zero: int = 0,
    sequence_parallel: bool = False,
    split_backward: bool = False,
    blocking_sends: bool = False,
    buffers: int = 2,
    name: str = "",
) -> PlanDraft:
    """A draft in which every cell is equal; dp follows from the number of chips.

    Args:
        model: the model. global_batch: [sequences].
        chips: chip indices, consumed tp fastest, then cp, replica, stage.
        pp, tp, cp, ep, microbatch [sequences], schedule, chunks: sizes and knobs.
        layers: per virtual stage; None splits evenly, larger shares first.
        recompute, zero, sequence_parallel, split_backward, blocking_sends, buffers: knobs.

    Raises:
        InputError: sizes that do not divide, a batch that does not, layers that do not add up.
    """
    sizes = {"pp": pp, "tp": tp, "cp": cp, "ep": ep, "microbatch": microbatch, "chunks": chunks}
    dp = check_sizes(len(chips), sizes)
    m = check_batch(global_batch, microbatch, dp, pp * tp * cp)
    virtual = pp * chunks
    counts = check_layers(
        model.num_layers, layers or split_layers(model.num_layers, virtual), virtual
    )
    width = tp * cp
    cells = tuple(
        CellKnobs(
            stage=s,
            replica=r,
            tp=tp,
            cp=cp,
            recompute=recompute,
            chips=tuple(chips[(s * dp + r) * width : (s * dp + r + 1) * width]),
        )
        for s in range(pp)
        for r in range(dp)
    )
    return PlanDraft(
        name=name
        or f"pp{pp} dp{dp} tp{tp}"
        + (f" cp{cp}" if cp > 1 else "")
        + (f" ep{ep}" if ep > 1 else ""),
        cells=cells,
        pipeline=PipelineKnobs(
            schedule="interleaved" if chunks > 1 and schedule == "1f1b" else schedule,
            chunks=chunks,
            cuts=layer_cuts(model, counts),
            microbatch=microbatch,
            buffers=buffers,
            split_backward=split_backward,
            blocking_sends=blocking_sends,
        ),
        data=DataKnobs(microbatches=(m,) * dp, zero=zero),
        tensor=TensorKnobs(sequence_parallel=sequence_parallel),
        expert=ExpertKnobs(ep=ep),
    )
