"""A fit as a file, and what it says of a run's accelerators."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec

import hardware_profiles
from sim.cost.compute import compute_dtype
from sim.errors import InputError
from sim.fidelity.amounts import Amounts
from sim.fidelity.cases import case_of, levels_of, precision_of
from sim.fidelity.chips import HOMES
from sim.fidelity.fit import BEST, LEVELS, REFERENCE, Fitted, predict
from sim.fidelity.settings import Settings
from sim.hardware.catalog import Catalog
from sim.hardware.resolve import resolve_accelerator

__all__ = ["BUNDLED", "Calibration", "FittedRates", "Spread", "numbers_of", "read_calibration"]

BUNDLED = "calibration.json"
"""Name of the fit that comes with hetlab, among the hardware profiles."""
FORMAT = 1


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of one kind of run, each predicted by a fit that had not seen its plan.

    Args:
        low, high: 10th and 90th percentile of log(measured / predicted). n: runs.
    """

    low: float
    high: float
    n: int


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """A fit with where it comes from.

    Args:
        format: of the file. source: what it was fitted to, in words. runs: how many.
        meanings: number -> what it is. fitted: numbers and offsets.
        spreads: kind of run -> errors. chips: names of the chips it knows.
    """

    format: int = FORMAT
    source: str
    runs: int
    meanings: dict[str, str]
    fitted: Fitted
    spreads: dict[str, Spread]
    chips: tuple[str, ...]


def read_calibration(file: str | Path | None = None) -> Calibration:
    """Read a fit; None reads the bundled one.

    Raises:
        InputError: unreadable, or of another format.
    """
    path = Path(str(hardware_profiles.folder() / BUNDLED)) if file is None else Path(file)
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Calibration)
    except OSError as error:
        raise InputError(f"cannot read it: {error.strerror}", file=str(path)) from None
    except msgspec.DecodeError as error:
        raise InputError(f"not a calibration: {error}", file=str(path)) from None
    if found.format != FORMAT:
        raise InputError(
            "a calibration of another format", file=str(path), key="format",
            found=str(found.format), expected=str(FORMAT),
        )  # fmt: skip
    return found


class FittedRates:
    """A fit as the rates of a predictor. Args: catalog: of profiles. fitted: the fit."""

    def __init__(self, catalog: Catalog, fitted: Fitted) -> None:
        self.catalog, self.fitted = catalog, fitted

    def numbers(self, s: Settings) -> dict[str, Any]:
        """Return the numbers of a run's accelerators by profile name."""
        return numbers_of(s, self.fitted, self.catalog)

    def step(self, s: Settings, amounts: Amounts) -> float:
        """Return the step time of a run's amounts [s]."""
        return float(predict(self.fitted, [case_of(s, amounts)])[0])

    def known(self, s: Settings) -> bool:
        """Return whether the fit saw all of the run's chips at its precision."""
        levels = [levels_of(s, name)["chip"] for name, _ in s.chips]
        return all(f"chip:{chip}" in self.fitted.offsets for chip in levels)


def numbers_of(s: Settings, fitted: Fitted, catalog: Catalog) -> dict[str, Any]:
    """Return the accelerator numbers of a run under a fit, by profile name, as a cluster says them.

    Args:
        s: settings of the run. fitted: numbers and offsets. catalog: where profiles lie.
    """
    x = fitted.numbers
    narrow = x["fp8"] if s.dtype == "fp8" else 1.0
    narrow *= x["fp4"] if precision_of(s) == "nvfp4" else 1.0
    core = x["attention_efficiency"] if s.flash else x["plain_attention"]
    found: dict[str, Any] = {}
    for name, _ in s.chips:
        home = HOMES[name]
        levels = levels_of(s, name)
        logs = dict.fromkeys((target for target, _ in LEVELS.values()), 0.0)
        for level, (target, _) in LEVELS.items():
            logs[target] += fitted.offsets.get(f"{level}:{levels[level]}", 0.0)
        factor = {k: math.exp(v) for k, v in logs.items()}
        chip, _ = resolve_accelerator(home.profile, None, catalog)
        wide = "bf16" if s.dtype == "fp8" else s.dtype
        peak = chip.peak_flops_per_s[compute_dtype(chip, wide)[0]] / home.cores
        growth = math.log(x["gemm_growth"]) * math.log(peak / REFERENCE)
        profile = home.profile if home.cores == 1 else f"{home.profile} core"
        found[profile] = {
            "gemm_efficiency": min(1.0, BEST * narrow / (factor["compute"] * factor["gemm"])),
            "gemm_half": x["gemm_half"] * math.exp(growth),
            "head_half": x["head_half"],
            "keys_half": x["keys_half"],
            "attention_efficiency": min(1.0, core / (factor["compute"] * factor["core"])),
            "memory_efficiency": min(
                1.0, x["memory_efficiency"] / (factor["compute"] * factor["traffic"])
            ),
            "optimizer_efficiency": min(1.0, x["optimizer_efficiency"]),
            "kernel_overhead": f"{x['kernel_overhead'] * factor['launch']} s",
            "routing_overhead": f"{x['routing_overhead'] * factor['launch']} s",
            "step_overhead": f"{x['step_overhead']} s",
            "misaligned": min(1.0, x["misaligned"]),
            "tp_cost": x["tp_cost"] * factor["tp"],
            "ep_cost": x["ep_cost"] * factor["ep"],
            "cp_cost": x["cp_cost"],
            "sync_cost": x["sync_cost"] * factor["sync"],
            "calibrated": f"chip:{levels['chip']}" in fitted.offsets,
        }
    return found
