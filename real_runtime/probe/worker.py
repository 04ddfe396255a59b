"""One rank of a probe: ``python -m real_runtime.probe.worker FOLDER RANK``."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from real_runtime.cores import cores_of, pin
from real_runtime.devices import backend_of, local_device
from real_runtime.probe.kernels import Meter, kernels
from real_runtime.probe.launch import SAY
from real_runtime.probe.records import Facts, ProbeSettings, Record
from real_runtime.probe.wires import host_copies, overlaps, wires

__all__ = ["main"]

WAIT = timedelta(seconds=120)


def _say(record: Record) -> None:
    sizes = " ".join(f"{k} {v:g}" for k, v in record.sizes.items())
    text = f"{record.what} {record.name} {sizes}: {record.median:.3g} s"
    print(SAY + text, file=sys.stderr, flush=True)  # noqa: T201 - the launcher reads this


def _facts(settings: ProbeSettings, device: torch.device) -> Facts:
    host = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory, chip = host / settings.ranks, ""
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    context = float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
    if device.type != "cpu":
        free, memory = map(float, torch.accelerator.get_memory_info(device))
        context = memory - free
        if device.type == "cuda":
            chip = torch.cuda.get_device_name(device)
    return Facts(
        device=device.type, chip=chip, vendor="", memory=memory, host_memory=host, context=context,
        torch=str(torch.__version__), threads=settings.threads, cores=cores or 1,
    )  # fmt: skip


def _records(settings: ProbeSettings, device: torch.device) -> Iterator[Record]:
    one = torch.zeros(1, device=device)

    def together() -> None:
        dist.all_reduce(one)
        float(one)

    meter = Meter(device, settings.repeats, settings.floor, together)
    dtypes = settings.dtypes or (("fp32", "bf16") if device.type == "cpu" else ("bf16", "fp32"))
    yield from wires(meter, settings)
    yield from overlaps(meter)
    yield from host_copies(meter)
    yield from kernels(meter, settings, dtypes)


def main(folder: str, rank: int) -> None:
    """Measure, and leave ``rank-N.json`` in the folder."""
    at = Path(folder)
    settings = msgspec.json.decode((at / "settings.json").read_bytes(), type=ProbeSettings)
    torch.set_num_threads(settings.threads)
    torch.manual_seed(rank)
    device = local_device(rank)
    cores = cores_of(settings.ranks) if device.type == "cpu" else ()
    if cores:
        pin(cores[rank])  # as in a run
    dist.init_process_group(
        backend_of(device), init_method=f"file://{at.absolute() / 'meeting'}", rank=rank,
        world_size=settings.ranks, timeout=WAIT,
    )  # fmt: skip
    facts, found = _facts(settings, device), []
    for record in _records(settings, device):
        found.append(record)
        if rank == 0:
            _say(record)
    (at / f"rank-{rank}.json").write_bytes(msgspec.json.encode((facts, found)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # native threads of a backend may still want the interpreter
