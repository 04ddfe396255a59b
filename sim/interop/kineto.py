"""Traces of the PyTorch profiler (Kineto, schema 1) -> durations of kernels by kind.

Only complete events (``ph`` "X") of a device count: categories kernel, gpu_memcpy and gpu_memset.
NCCL kernels carry their collective, size, dtype and group in ``args`` in recent versions of torch.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import msgspec

from sim.errors import InputError
from sim.interop.link_records import MAX_FILE, Transfer, limited, member_transfer

__all__ = ["KernelTime", "kernel_kind", "kineto_transfers", "read_kineto", "seconds_by_kind"]

_CATEGORIES = {"kernel": "", "gpu_memcpy": "copy", "gpu_memset": "copy"}
_KINDS = (
    ("collective", re.compile(r"nccl|rccl|hccl|allreduce|all_reduce|reduce_scatter", re.I)),
    ("attention", re.compile(r"flash|fmha|attention|softmax_warp", re.I)),
    ("gemm", re.compile(r"gemm|cutlass|xmma|cublas|matmul|wgmma|cijk_", re.I)),
    ("optimizer", re.compile(r"multi_tensor_apply|adam|fused_optim", re.I)),
)
_DTYPES = {
    "float": 4, "float32": 4, "half": 2, "float16": 2, "bfloat16": 2, "double": 8, "float64": 8,
    "int": 4, "int32": 4, "long": 8, "int64": 8, "byte": 1, "uint8": 1, "char": 1, "int8": 1,
}  # fmt: skip
_NAMES = {
    "allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter",
    "allgatherbase": "all_gather", "reducescatterbase": "reduce_scatter",
}  # fmt: skip


class KernelTime(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel.

    Args:
        name: as traced. kind: see ``kernel_kind``. start: [s] of the trace's clock. seconds: [s].
        collective: "all_reduce" ..., "" for other kernels. nbytes: [B] of the whole tensor, 0 when
            unknown. ranks: members, 0 when unknown.
    """

    name: str
    kind: str
    start: float
    seconds: float
    collective: str = ""
    nbytes: float = 0.0
    ranks: int = 0


def read_kineto(text: str) -> tuple[KernelTime, ...]:
    """Read the kernels of a trace, by start.

    Raises:
        InputError: no JSON, no list of events, a kernel without times.
    """
    try:
        document = json.loads(limited(text, "the trace", MAX_FILE))
    except json.JSONDecodeError as error:
        raise InputError("no trace", line=error.lineno, found=error.msg, expected="JSON") from None
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise InputError("no events", key="traceEvents", expected="a list")
    found = []
    for i, event in enumerate(events):
        if isinstance(event, dict) and event.get("ph") == "X":
            category = str(event.get("cat", "")).lower()
            if category in _CATEGORIES:
                found.append(_kernel(event, f"traceEvents.{i}", _CATEGORIES[category]))
    return tuple(sorted(found, key=lambda k: k.start))


def _kernel(event: dict[str, Any], key: str, kind: str) -> KernelTime:
    times = []
    for name in ("ts", "dur"):
        value = event.get(name)
        try:
            times.append(float(value) * 1e-6)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise InputError(
                "no number", key=f"{key}.{name}", found=repr(value), expected="microseconds"
            ) from None
    name, said = str(event.get("name", "")), event.get("args")
    args: dict[str, Any] = said if isinstance(said, dict) else {}
    kind = kind or kernel_kind(name)
    collective, nbytes, ranks = _collective(name, args) if kind == "collective" else ("", 0.0, 0)
    return KernelTime(
        name=name, kind=kind, start=times[0], seconds=times[1], collective=collective,
        nbytes=nbytes, ranks=ranks,
    )  # fmt: skip


def _collective(name: str, args: dict[str, Any]) -> tuple[str, float, int]:
    plain = str(args.get("Collective name") or "").lower().replace("_", "")
    word = plain.strip() or name.lower().replace("_", "")
    known = next((full for short, full in _NAMES.items() if short in word), "")
    if known == "all_reduce" and "reducescatter" in word:
        known = "reduce_scatter"
    size = _DTYPES.get(str(args.get("dtype", "")).lower(), 0)
    # The larger side is the whole tensor: gathered by one, scattered by another.
    elements = max(_count(args.get("In msg nelems")), _count(args.get("Out msg nelems")))
    return known, float(elements * size), _count(args.get("Group size"))


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def kernel_kind(name: str) -> str:
    """Return what a kernel does by its name: collective, attention, gemm, optimizer, elementwise.

    >>> kernel_kind("ncclDevKernel_AllReduce_Sum_f32"), kernel_kind("ampere_sgemm_128x64_tn")
    ('collective', 'gemm')
    """
    return next((kind for kind, test in _KINDS if test.search(name)), "elementwise")


def seconds_by_kind(kernels: Iterable[KernelTime]) -> dict[str, tuple[float, int]]:
    """Kind -> (summed duration [s], kernels), the longest first; overlaps count twice."""
    total: dict[str, list[float]] = defaultdict(list)
    for k in kernels:
        total[k.kind].append(k.seconds)
    found = {kind: (sum(times), len(times)) for kind, times in total.items()}
    return dict(sorted(found.items(), key=lambda item: -item[1][0]))


def kineto_transfers(kernels: Iterable[KernelTime]) -> tuple[Transfer, ...]:
    """Messages between neighbours that the trace's collectives of known size stand for.

    A collective's kernel runs while it waits for other members, so the shortest of equal ones
    counts.

    Raises:
        InputError: no collective has a size and a group.
    """
    fastest: dict[tuple[str, int, float], float] = {}
    for k in kernels:
        if k.collective and k.nbytes > 0 and k.ranks > 1 and k.seconds > 0:
            key = (k.collective, k.ranks, k.nbytes)
            fastest[key] = min(fastest.get(key, k.seconds), k.seconds)
    if not fastest:
        raise InputError(
            "no collective with its size and group in the trace",
            expected="args with In msg nelems, dtype and Group size, as recent torch writes them",
        )
    return tuple(member_transfer(c, n, size, t) for (c, n, size), t in fastest.items())
