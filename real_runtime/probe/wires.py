"""Times between ranks and between a host and its device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.distributed as dist

from real_runtime.devices import synchronize
from real_runtime.probe.kernels import Meter
from real_runtime.probe.records import ProbeSettings, Record

__all__ = ["host_copies", "overlaps", "wires"]

SAMPLES = 3
"""Messages measured per repeat."""
PRODUCTS = 4
"""Products of 256 x 256 before each message."""


class _Messages:
    """Times messages as a step sends them, each after compute of its rank.

    Back to back they are up to ten times as fast where a transport's threads share the ranks' cores
    (gloo): they then are awake, and their turn has come.
    """

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.a = torch.randn(256, 256, device=meter.device)
        self.out = torch.empty_like(self.a)

    def record(
        self, what: str, name: str, nbytes: int, work: Callable[[], object], ways: int = 1
    ) -> Record:
        """Time one call; ``ways`` are the messages one after another in it."""
        meter, found = self.meter, []
        work()
        meter.together()
        for _ in range(SAMPLES * meter.repeats):
            for _ in range(PRODUCTS):
                torch.mm(self.a, self.a, out=self.out)
            synchronize(meter.device)
            found.append(meter.seconds(work, 1) / ways)
        low, middle, high = np.percentile(found, (25, 50, 75)).tolist()
        return Record(
            what=what, name=name, sizes={"nbytes": float(nbytes)}, median=middle, low=low,
            high=high, repeats=len(found),
        )  # fmt: skip


def wires(meter: Meter, settings: ProbeSettings) -> Iterator[Record]:
    """Yield ping-pong times of ranks 0 and 1, one way, then the collectives of all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if size < 2:
        return
    messages = _Messages(meter)
    for nbytes in settings.messages:
        buffer = torch.zeros(nbytes, dtype=torch.uint8, device=meter.device)

        def ping(buffer: torch.Tensor = buffer) -> None:
            if rank < 2:
                (dist.send if rank == 0 else dist.recv)(buffer, 1 - rank)
                (dist.recv if rank == 0 else dist.send)(buffer, 1 - rank)

        found = messages.record("ping", "", nbytes, ping, ways=2)
        if rank == 0:
            yield found
    for nbytes in settings.messages:
        if nbytes >= 4 * size:
            yield from _collectives(messages, nbytes // (4 * size) * size)


def _collectives(messages: _Messages, count: int) -> Iterator[Record]:
    """The three collectives of a tensor of ``count`` fp32 elements, which the ranks divide."""
    size, device = dist.get_world_size(), messages.meter.device
    whole = torch.zeros(count, device=device)
    part = torch.zeros(count // size, device=device)
    ways: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_single(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_single(part, whole),
    }
    for name, work in ways.items():
        yield messages.record("collective", name, whole.nbytes, work)


def overlaps(meter: Meter) -> Iterator[Record]:
    """Yield compute and an all-reduce alone, and each while the other runs all the time."""
    if dist.get_world_size() < 2:
        return
    device = meter.device
    a = torch.randn(256, 256, device=device)
    out, tensor = torch.empty_like(a), torch.zeros(1 << 19, device=device)
    lasts = max(2 * meter.floor, 5e-3)
    work = _agreed(meter, lambda: torch.mm(a, a, out=out), lasts)
    sums = _agreed(meter, lambda: dist.all_reduce(tensor), lasts)

    def compute(times: int) -> float:
        return meter.seconds(lambda: torch.mm(a, a, out=out), times)

    def begin(times: int) -> list[dist.Work]:
        return [dist.all_reduce(tensor, async_op=True) for _ in range(times)]

    found: dict[str, list[float]] = {}
    for _ in range(meter.repeats):
        meter.together()
        found.setdefault("compute", []).append(compute(work))
        meter.together()
        found.setdefault("comm", []).append(_until(begin(sums), device, lambda: None))
        meter.together()
        pending = begin(6 * sums)  # outlasts the compute
        found.setdefault("compute beside comm", []).append(compute(work))
        _until(pending, device, lambda: None)
        meter.together()
        took = _until(begin(sums), device, lambda: compute(1))
        found.setdefault("comm beside compute", []).append(took)
    for name, times in found.items():
        low, middle, high = np.percentile(times, (25, 50, 75)).tolist()
        yield Record(
            what="overlap", name=name, median=middle, low=low, high=high, repeats=len(times)
        )


def _agreed(meter: Meter, work: Callable[[], object], seconds: float) -> int:
    """Calls that last about this long on rank 0; the same number on all ranks."""
    meter.seconds(work, 2)
    calls = max(int(seconds / max(meter.seconds(work, 4) / 4, 1e-7)), 1)
    said = torch.tensor([calls], device=meter.device)
    dist.broadcast(said, 0)
    return int(said)


def _until(
    pending: list[dist.Work], device: torch.device, meanwhile: Callable[[], object]
) -> float:
    """Time until all is over [s], with something done meanwhile."""
    begin = time.perf_counter()
    for item in pending:
        while not item.is_completed():
            if meanwhile() is None:
                item.wait()
        item.wait()
    synchronize(device)
    return time.perf_counter() - begin


def host_copies(meter: Meter) -> Iterator[Record]:
    """Yield copies between host and device, from pinned and pageable memory; none on a host."""
    if meter.device.type == "cpu":
        return
    count = 1 << 24
    there = torch.empty(count, device=meter.device)
    for name, pinned in (("pinned", True), ("pageable", False)):
        here = torch.empty(count, pin_memory=pinned)
        sizes = {"nbytes": float(here.nbytes)}
        yield meter.record(
            "host_copy", f"to device, {name}", sizes,
            lambda here=here: there.copy_(here, non_blocking=True),  # type: ignore[misc]
        )  # fmt: skip
        yield meter.record(
            "host_copy", f"to host, {name}", sizes,
            lambda here=here: here.copy_(there, non_blocking=True),  # type: ignore[misc]
        )  # fmt: skip
