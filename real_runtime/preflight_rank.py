"""One rank's part of the pre-flight checks: what it finds here, and the exchange."""

from __future__ import annotations

import platform
import socket
import time
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist

from real_runtime.devices import backend_of
from real_runtime.errors import RunError
from real_runtime.preflight import (
    PreflightError,
    RankFacts,
    Store,
    Verdict,
    compare,
    digest_of_data,
    exchange,
    predicted_memory,
)
from real_runtime.settings import RunSettings
from sim.plan.plan import Plan
from sim.problem import problem_from_documents

__all__ = ["preflight"]


def preflight(
    store: Store, plan: Plan, settings: RunSettings, rank: int, size: int, device: torch.device
) -> Verdict:
    """Compare the ranks before weights are loaded; every rank must call this.

    Args:
        store: of the rendezvous. plan, settings: of the run. rank, size: of the world.
        device: of this rank.

    Raises:
        PreflightError: on rank 0, something is wrong; names rank and host.
        RunError: on the others, with the same text; or a rank is gone or silent.
    """
    mine = _facts(plan, settings, rank, device)
    problem = problem_from_documents(plan.problem)
    # What an emulated chip would hold besides, e.g. for its driver, nobody needs here.
    asked = rank == 0 and not settings.emulate
    predicted = predicted_memory(plan, problem) if asked else {}
    verdict = exchange(store, mine, size, lambda facts: compare(facts, predicted), time.time)
    if verdict.faults:
        worst = verdict.faults[0]
        others = [f"rank {f.rank}: {f.text}" for f in verdict.faults[1:4]]
        hidden = len(verdict.faults) - 1 - len(others)
        text = "; ".join([worst.text, *others, *([f"and {hidden} more"] if hidden else [])])
        if rank:
            raise RunError(f"rank {worst.rank}: {text}")
        raise PreflightError(text, worst.exit_code, worst.rank)
    return verdict


def _facts(plan: Plan, settings: RunSettings, rank: int, device: torch.device) -> RankFacts:
    missing = unreadable = data = ""
    backend = backend_of(device)
    if not dist.is_backend_available(backend):
        missing = f"torch {torch.__version__} has no backend {backend} for {device.type}"
    try:
        data = digest_of_data(Path(settings.data))
    except PreflightError as error:
        unreadable = error.message
    return RankFacts(
        rank=rank, host=socket.gethostname(), python=platform.python_version(),
        torch=str(torch.__version__), hetlab=metadata.version("hetlab"), device=str(device),
        build=_build(), backend=backend, missing=missing, unreadable=unreadable,
        free_bytes=_free(device), plan=plan.hash, data=data,
    )  # fmt: skip


def _build() -> str:
    """What torch was built for, without versions."""
    found = [n for n in ("cuda", "hip", "xpu") if getattr(torch.version, n, None)]
    return " ".join(found) or "cpu"


def _free(device: torch.device) -> float:
    """[B] left on the device, or on the host, 0 where the system does not say."""
    if device.type != "cpu":
        return float(torch.accelerator.get_memory_info(device)[0])
    file = Path("/proc/meminfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return float(found[0]) * 1024 if found else 0.0
