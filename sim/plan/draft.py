"""PlanDraft: an unfinished plan as plain data, one frozen record of knobs per axis.

Strategies compose by returning a new draft; ``import``, ``validate`` and ``calibrate`` fill one
without importing a strategy. sim.plan.lower turns a draft into a Plan.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sim.errors import InputError
from sim.plan.placement import CellOffload, Recompute, Segment
from sim.plan.plan import Amount, Call, Table

__all__ = [
    "CellKnobs",
    "DataKnobs",
    "ExpertKnobs",
    "OffloadKnobs",
    "PipelineKnobs",
    "PlanDraft",
    "TensorKnobs",
    "split_layers",
]


class CellKnobs(msgspec.Struct, frozen=True, kw_only=True):
    """Knobs of one cell.

    Args:
        stage, replica: where it is in the grid.
        chips: chip indices in the machine, tensor-parallel index fastest; len == tp * cp.
        tp, cp: sizes. recompute: what F keeps. offload: see sim.plan.placement.Cell.
    """

    stage: int
    replica: int
    chips: tuple[int, ...]
    tp: int = 1
    cp: int = 1
    recompute: Recompute = "none"
    offload: CellOffload = ""


class PipelineKnobs(msgspec.Struct, frozen=True, kw_only=True):
    """Knobs of the pipeline axis.

    Args:
        schedule: name in sim.plan.schedules.SCHEDULES. chunks: virtual stages per position.
        cuts: block index where each virtual stage starts, and the number of blocks at the end;
            length number of virtual stages + 1; () for one stage with everything.
        microbatch: [sequences].
        buffers: receive buffers per directed rank pair, 0 for rendezvous.
        split_backward: B as I then W, the send of the input gradient between them (H2's overlap).
        blocking_sends: compute waits for its own sends.
        blocking_p2p: a rank does one thing at a time: sends and receives block it too.
        whole_boundaries: boundary tensors go whole to every receiving rank instead of in pieces
            that are gathered there.
        order: an order written out instead of the schedule's, one row per position (see
            sim.plan.schedules.explicit_order), () for the schedule's.
    """

    schedule: str = "1f1b"
    chunks: int = 1
    cuts: tuple[int, ...] = ()
    microbatch: int = 1
    buffers: int = 2
    split_backward: bool = False
    blocking_sends: bool = False
    blocking_p2p: bool = False
    whole_boundaries: bool = False
    order: tuple[str, ...] = ()


class DataKnobs(msgspec.Struct, frozen=True, kw_only=True):
    """Knobs of the data axis.

    Args:
        microbatches: of each replica.
        zero: what the replicas share out: nothing (0), optimizer states (1), gradients too (2),
            parameters too (3).
        buffers: segments gathered, and gradients before their sum, that a chip keeps under ZeRO-2
            and 3; 0 for the rings that ``OffloadKnobs`` names.
        workers: see Placement.
    """

    microbatches: tuple[int, ...] = (1,)
    zero: int = 0
    buffers: int = 0
    workers: tuple[int, ...] = ()


class TensorKnobs(msgspec.Struct, frozen=True, kw_only=True):
    """Knobs of the tensor axis: ``sequence_parallel`` splits the rest of the activations too."""

    sequence_parallel: bool = False


class ExpertKnobs(msgspec.Struct, frozen=True, kw_only=True):
    """Knobs of the expert axis.

    Args:
        ep: consecutive replicas share the experts of a stage.
        inlined: a pass writes layers of experts out, so stages are cut into layers where the draft
            names no segments.
    """

    ep: int = 1
    inlined: bool = False


class OffloadKnobs(msgspec.Struct, frozen=True, kw_only=True):
    """Knobs of the offload axis.

    Args:
        segments: finer segments than one per virtual stage, with names and what lives on the host;
            () for one per stage.
        parameter_buffers, gradient_buffers, late_updates: see Placement.
    """

    segments: tuple[Segment, ...] = ()
    parameter_buffers: int = 2
    gradient_buffers: int = 2
    late_updates: bool = False


class PlanDraft(msgspec.Struct, frozen=True, kw_only=True):
    """An unfinished plan.

    Args:
        name: for people. cells: the grid.
        pipeline, data, tensor, expert, offload: knobs per axis.
        exact: False when the mathematics changes; ``reason`` says how.
        passes: further lowering passes, after the built-in ones.
        tables: late amounts. amounts: of ops that passes add. barrier: BARRIER ends each step.
        servers: chip of each rank outside the cells; a process of the node may share a cell's chip.
        assumptions: in words. knobs: what each strategy chose, for the report.
    """

    name: str = ""
    cells: tuple[CellKnobs, ...] = ()
    pipeline: PipelineKnobs = PipelineKnobs()
    data: DataKnobs = DataKnobs()
    tensor: TensorKnobs = TensorKnobs()
    expert: ExpertKnobs = ExpertKnobs()
    offload: OffloadKnobs = OffloadKnobs()
    exact: bool = True
    reason: str = ""
    passes: tuple[Call, ...] = ()
    tables: dict[str, Table] = {}
    amounts: dict[str, Amount] = {}
    barrier: bool = True
    servers: tuple[int, ...] = ()
    assumptions: tuple[str, ...] = ()
    knobs: dict[str, Any] = {}


def split_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers per stage, as equal as possible, the larger shares first; no layer is ever dropped.

    >>> split_layers(30, 4)
    (8, 8, 7, 7)

    Raises:
        InputError: fewer layers than stages.
    """
    if num_stages < 1 or num_layers < num_stages:
        raise InputError(
            "every stage needs at least one layer",
            key="pp",
            found=f"{num_layers} layers on {num_stages} stages",
            expected=f"at most {num_layers} stages",
        )
    base, more = divmod(num_layers, num_stages)
    return tuple(base + (i < more) for i in range(num_stages))
