"""Devices and their backends: the only module that knows what kind of chip a rank runs on."""

from __future__ import annotations

import resource
import sys

import torch
import torch.distributed as dist

__all__ = ["backend_of", "local_device", "pairs_need_groups", "peak_memory", "synchronize"]


def local_device(local_rank: int) -> torch.device:
    """Return this process's device: an accelerator when there is one, else the processor.

    Args:
        local_rank: number of the process on its host; accelerators are dealt out in this order.
    """
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    device = torch.device(kind.type, local_rank % torch.accelerator.device_count())
    torch.accelerator.set_device_index(device)
    return device


def backend_of(device: torch.device) -> str:
    """Return torch's own backend for a device."""
    return dist.get_default_backend_for_device(device)


def pairs_need_groups(device: torch.device) -> bool:
    """Whether each directed rank pair needs a process group of its own.

    Accelerator backends run a group's transfers on one stream, where a receive posted early would
    keep the send behind it, and so its peer, waiting for ever.
    """
    return device.type != "cpu"


def synchronize(device: torch.device) -> None:
    """Wait for what the device has been given; on a processor nothing is ever outstanding."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def peak_memory(device: torch.device) -> float:
    """Return the most memory [B] this process has used: allocated on its device, or resident."""
    if device.type != "cpu":
        return float(torch.accelerator.max_memory_allocated(device))
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
