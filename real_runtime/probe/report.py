"""What a probe found, as one document and as a table. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from real_runtime.probe.fit import Chip, Wire
from real_runtime.probe.records import Facts, Record, select, spread
from sim.cost.collective import collective_cost
from sim.hardware.machine import Machine
from sim.hardware.route import path, transfer_time

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["print_probe", "probe_document"]


def probe_document(
    facts: Facts, chip: Chip, wire: Wire | None, records: list[Record], machine: Machine
) -> dict[str, Any]:
    """Everything about a probe as plain data.

    ``transfers`` and ``collectives`` say how far what the profile predicts is from the measured
    times.
    """
    group = range(machine.num_chips)
    transfers = [
        {
            "nbytes": r.sizes["nbytes"],
            "measured_s": r.median,
            "spread": spread(r),
            "predicted_s": transfer_time(path(machine, 0, 1), r.sizes["nbytes"]),
        }
        for r in select(records, "ping")
    ]
    collectives = [
        {
            "kind": r.name,
            "nbytes": r.sizes["nbytes"],
            "measured_s": r.median,
            "spread": spread(r),
            "predicted_s": collective_cost(machine, r.name, group, r.sizes["nbytes"]).seconds,
        }
        for r in select(records, "collective")
    ]
    return {
        "facts": msgspec.to_builtins(facts),
        "chip": msgspec.to_builtins(chip),
        "link": msgspec.to_builtins(wire) if wire is not None else None,
        "transfers": transfers,
        "collectives": collectives,
        "records": msgspec.to_builtins(records),
    }


def print_probe(console: Console, d: dict[str, Any]) -> None:
    """Print the numbers of a probe with their spreads, and the collectives beside the model's."""
    chip, link = d["chip"], d["link"]
    rows = [(f"peak {dtype}", n, 1e9, "GFLOP/s") for dtype, n in chip["peaks"].items()]
    rows += [
        ("gemm_efficiency", chip["gemm_efficiency"], 1, ""),
        ("gemm_half", chip["gemm_half"], 1, ""),
        ("attention_efficiency", chip["attention_efficiency"], 1, ""),
        ("optimizer_efficiency", chip["optimizer_efficiency"], 1, ""),
        ("memory_bandwidth", chip["memory_bandwidth"], 1e9, "GB/s"),
        ("memory_efficiency", chip["memory_efficiency"], 1, ""),
        ("kernel_overhead", chip["kernel_overhead"], 1e-6, "us"),
    ]
    if link is not None:
        rows += [
            ("compute_slowdown", chip["compute_slowdown"], 1, ""),
            ("comm_slowdown", chip["comm_slowdown"], 1, ""),
            ("link rate", link["rate"], 1e9, "GB/s"),
            ("link latency", link["transfer"]["latency"], 1e-6, "us"),
        ]
    lines = [f"{'':<22}{'median':>12}         {'spread':>8}   how"]
    for name, n, unit, text in rows:
        lines.append(
            f"{name:<22}{n['value'] / unit:>12.4g} {text:<8}{n['spread']:>8.1%}   {n['how']}"
        )
    if d["collectives"]:
        lines += ["", f"{'message':<16}{'bytes':>12}{'measured':>14}{'profile says':>16}"]
    for c in (*d["transfers"], *d["collectives"]):
        measured, predicted = c["measured_s"] * 1e6, c["predicted_s"] * 1e6
        lines.append(
            f"{c.get('kind', 'transfer'):<16}{c['nbytes']:>12,.0f}{measured:>11,.1f} us"
            f"{predicted:>13,.1f} us"
        )
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
