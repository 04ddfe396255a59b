"""Routing from files: counts as CSV or npz, and the traces that public tools write.

Read: counts (step, layer, expert[, source], count); LAER-MoE's trace of rank loads
(https://github.com/PKU-DAIR/Hetu-Galvatron, branch laer-moe, scripts_ae/token_analysis_backup.csv);
Megatron-Core's router tracer (core.transformer.moe.router_trace, one JSONL file per rank); vLLM's
routed experts, npy [tokens, layers, k]. Nothing is unpickled, and no array is made before its size
is known to be one that a run can have.
"""

from __future__ import annotations

import csv
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from strategies.expert.routing import Routing
from strategies.expert.routing_input import experts_of, limited, places, zeros
from strategies.expert.routing_tables import count_rows, laer_rows
from strategies.expert.routing_traces import counts_of_npz, ids_routing, tracer_routing

__all__ = ["load_routing", "save_routing"]

Ints = NDArray[np.int64]


def load_routing(
    path: str | os.PathLike[str],
    *,
    experts: int | None = None,
    devices: int = 4,
    steps: int = 1,
    sources: int = 1,
    method: str = "",
    model: str = "",
) -> Routing:
    """Read routing from a file, or from a folder with a tracer's file per rank.

    Args:
        path: .csv, .npz, .jsonl or .npy, or a folder of .jsonl files.
        experts: E; None means one more than the largest named. LAER's file names shards, not
            experts, so there it is needed.
        devices: of LAER's expert-parallel groups; the groups become the sources.
        steps, sources: of ids of tokens (.npy), which are cut into equal parts in their order.
        method, model: of LAER's file, which holds several; "" takes the only one.

    Raises:
        InputError: a file that cannot be read or holds no routing, with the line or key.
    """
    file = Path(path)
    try:
        if file.is_dir() or file.suffix == ".jsonl":
            return tracer_routing(file, experts)
        if file.suffix == ".csv":
            return _csv(file, experts, devices, method, model)
        if file.suffix == ".npz":
            return Routing(counts_of_npz(file), f"counts of {file.name}")
        if file.suffix == ".npy":
            return ids_routing(file, experts, steps, sources)
    except (OSError, ValueError, csv.Error) as error:
        raise InputError(f"cannot read this routing: {error}", file=str(file)) from error
    raise InputError(
        "no known form of routing",
        file=str(file),
        found=file.suffix or "no suffix",
        expected=".csv, .npz, .npy, .jsonl or a folder of .jsonl files",
    )


def save_routing(path: str | os.PathLike[str], routing: Routing) -> None:
    """Write counts as npz, first beside the file and then in its place.

    Args:
        path: ends in .npz. routing: any.

    Raises:
        InputError: another suffix, or a place that cannot be written.
    """
    file = Path(path)
    if file.suffix != ".npz":
        raise InputError(
            "routing is written as npz", file=str(file), found=file.suffix, expected=".npz"
        )
    beside = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with beside.open("wb") as out:
            np.savez_compressed(out, counts=routing.counts)
        beside.replace(file)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise InputError(
            f"cannot write this routing: {error.strerror or error}", file=str(file)
        ) from error


def _csv(file: Path, experts: int | None, devices: int, method: str, model: str) -> Routing:
    with file.open(encoding="utf-8-sig", newline="") as lines:
        names = [n.strip().lower() for n in lines.readline().split(",")]
        if "token_num" in names or ("rank" in names and "method" in names):
            rows, shards = laer_rows(file, names, lines, devices, method, model), devices
        else:
            rows, shards = count_rows(file, names, lines), 0
    if not shards:
        number = experts_of(file, rows[:, 2], experts)
        return Routing(_filled(file, rows, number), f"counts of {file.name}")
    if experts is None or experts < shards or experts % shards:
        raise InputError(
            "a trace of shards does not say how many experts a shard has",
            file=str(file),
            key="experts",
            found=str(experts),
            expected=f"a multiple of {shards}",
        )
    loads = _filled(file, rows, shards)
    limited(file, (*loads.shape[:2], experts, loads.shape[3]))
    whole, rest = np.divmod(loads, experts // shards)
    place = np.arange(experts // shards)[:, None]
    counts = whole[:, :, :, None] + (place < rest[:, :, :, None])
    return Routing(
        counts.reshape(*loads.shape[:2], experts, loads.shape[3]).astype(np.int64),
        f"loads of shards in {file.name}, spread evenly over the experts of a shard; "
        "a source is an expert-parallel group",
    )


def _filled(file: Path, rows: Ints, experts: int) -> Ints:
    step, layer, source = (places(rows[:, c]) for c in (0, 1, 3))
    shape = (int(step.max()) + 1, int(layer.max()) + 1, experts, int(source.max()) + 1)
    counts = zeros(file, shape)
    counts[step, layer, rows[:, 2], source] = rows[:, 4]
    return counts
