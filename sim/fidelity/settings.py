"""A run's columns -> complete settings, each known to be stated, derived or filled by a rule."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from functools import lru_cache
from typing import Any

import msgspec

from sim.fidelity.chips import HOMES, chips_of
from sim.fidelity.rules import BLOCKING, ERAS, SEQUENCE_PARALLEL, WHOLE, rules_of
from sim.fidelity.runs import MeasuredRun, read_runs
from sim.fidelity.sizes import config_of
from sim.fidelity.skip import Skip

__all__ = ["NOT_TIMED", "Settings", "settings_of", "stack_of"]

_DTYPES = (
    ("nvfp4", "fp8"), ("fp8", "fp8"), ("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "tf32"),
    ("amp", "bf16"),
)  # fmt: skip
"""Part of the precision column -> compute dtype, first match; amp is 16-bit autocast, and
products of fp32 tensors run in tf32 where a chip has it, as in NVIDIA's containers."""
NOT_TIMED = (
    "time_to_train", "speedup_over_baseline_plan", "speedup_over_baseline_high",
    "speedup_over_baseline_low", "speedup_over_weighted_homogeneous",
    "speedup_over_megatron_low", "communication_reduction", "compute_utilisation_low",
    "compute_utilisation_high", "compute_utilisation_global", "compute_utilisation_us",
    "allreduce_time_median", "trained_to_completion", "trained_in_days",
    "decode_tokens_per_s_single_batch", "gpu_hours_per_trillion_tokens",
    "fraction_of_theoretical_upper_bound", "mfu_percent_low", "mfu_percent_high",
)  # fmt: skip
"""Metrics that are about no single training step."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides a run's plan.

    Args:
        config: of the model, Hugging Face's keys. model: name. chips: (name, count).
        dtype: of products. precision: as stated. seq: [tokens]. gbs, mbs: [sequences].
        tp, pp, ep, cp, dp, vpp: sizes. recompute: "none", "selective" or "full". zero: 0 to 3.
        sequence_parallel, flash, blocking: see the plan and the job.
        layers_per_stage: blocks of layer size per stage, embedding and head counted; () even.
        before, after: units of ``layers_per_stage`` that stand before and behind the layers.
        stack: software and its era.
        filled: (column, value, reason) of what no column says. notes: other assumptions.
    """

    config: dict[str, Any]
    model: str
    chips: tuple[tuple[str, int], ...]
    dtype: str
    precision: str
    seq: int
    gbs: int
    mbs: int
    tp: int
    pp: int
    ep: int
    cp: int
    dp: int
    vpp: int
    recompute: str
    zero: int
    sequence_parallel: bool
    flash: bool
    blocking: bool
    layers_per_stage: tuple[int, ...] = ()
    before: int = 1
    after: int = 1
    stack: str = ""
    filled: tuple[tuple[str, str, str], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def num_chips(self) -> int:
        """Chips of the run."""
        return sum(n for _, n in self.chips)

    @property
    def moe(self) -> bool:
        """Whether the model routes tokens to experts."""
        return any("expert" in key for key in self.config)


_FROM_SIBLINGS = ("vpp", "ep")
"""Columns that a source leaves out of some tables and states in others for the same layout."""
_LAYOUT = ("model", "chips", "tp", "pp")


@lru_cache(maxsize=1)
def _layouts() -> dict[tuple[str, ...], Counter[int]]:
    """(column, source, layout) -> what bundled runs state for the column."""
    found: dict[tuple[str, ...], Counter[int]] = defaultdict(Counter)
    for run in read_runs():
        for column in _FROM_SIBLINGS:
            stated = run.integer(column)
            if stated is not None:
                found[column, run.source, *(run.text(c) for c in _LAYOUT)][stated] += 1
    return found


def sibling_of(run: MeasuredRun, column: str) -> int | None:
    """Return what bundled runs of the same source, model, chips, tp and pp state most often."""
    known = _layouts().get((column, run.source, *(run.text(c) for c in _LAYOUT)))
    return max(known, key=lambda v: (known[v], v)) if known else None


def settings_of(run: MeasuredRun) -> Settings:
    """Return a run's settings.

    Raises:
        Skip: a field is missing that no rule fills, or the run needs a feature that is not there.
    """
    if all(v.metric in NOT_TIMED for v in run.values):
        raise Skip(f"{run.values[0].metric} is about no single training step")
    chips = chips_of(run.text("chips"))
    filled: list[tuple[str, str, str]] = []
    notes: list[str] = []
    rules = rules_of(run.source)

    def number(column: str) -> int:
        stated = run.integer(column)
        if stated is not None:
            return stated
        like = sibling_of(run, column) if column in _FROM_SIBLINGS else None
        if like is not None:
            filled.append((column, str(like), "as the same layout of another release states"))
            return like
        rule = rules.get(column)
        if rule is None:
            raise Skip(f"no {column} in the file")
        filled.append((column, rule.value, rule.reason))
        return int(rule.value)

    def word(column: str) -> str:
        stated = run.text(column)
        if stated and "see config" not in stated:
            return stated.lower()
        rule = rules[column]
        filled.append((column, rule.value, rule.reason))
        return rule.value.lower()

    config = config_of(run, notes)
    precision = run.text("precision")
    if not precision:
        filled.append(("precision", "bf16", "16-bit training where none is stated"))
    tp, pp, cp = number("tp"), number("pp"), number("cp")
    devices = sum(count * HOMES[name].cores for name, count in chips if name in HOMES)
    dp = run.integer("dp")
    if dp is None:
        dp = max(1, devices // (tp * pp * cp))
        filled.append(("dp", str(dp), "chips over tp x pp x cp"))
    if devices and tp * pp * cp * dp != devices:
        raise Skip(f"tp {tp} x pp {pp} x cp {cp} x dp {dp} is not the {devices} chips stated")
    seq = number("seq")
    gbs = _batch(run, seq)
    if gbs is None:
        gbs = number("gbs")
    if gbs < dp and run.integer("dp") is None and run.integer("cp") is None:
        cp = cp * dp // gbs
        dp = devices // (tp * pp * cp)
        filled.append(("cp", str(cp), "fewer sequences than chips: each is split over several"))
    vpp = number("vpp")
    if run.integer("mbs") is None and rules["mbs"].value == WHOLE:
        mbs = max(1, gbs // dp)
        filled.append(("mbs", str(mbs), rules["mbs"].reason))
    else:
        mbs = number("mbs")
    recompute = word("recompute")
    ep = number("ep")
    if dp % ep:
        fits = max(n for n in range(1, ep + 1) if ep % n == 0 and dp % n == 0)
        notes.append(f"ep {ep} reaches into the tensor axis: {fits} over replicas, rest by tp")
        ep = fits
    sp = tp > 1 and (run.source in SEQUENCE_PARALLEL or "sequence parallel" in recompute)
    per_stage, before, after = _stages(run)
    zero = _zero(word("zero"))
    if zero >= 2 and pp > 1:
        notes.append("sharded parameters of a pipeline are gathered once a step, as under ZeRO-1")
        zero = 1
    return Settings(
        config=config, model=run.text("model"), chips=chips, dtype=_dtype(precision or "bf16"),
        precision=precision, seq=seq, gbs=gbs, mbs=mbs, tp=tp, pp=pp, ep=ep, cp=cp, dp=dp,
        vpp=vpp, recompute=_recompute(recompute), zero=zero, sequence_parallel=sp,
        flash=_flash(run), blocking=run.source in BLOCKING, layers_per_stage=per_stage,
        before=before, after=after, stack=stack_of(run), filled=tuple(filled), notes=tuple(notes),
    )  # fmt: skip


def stack_of(run: MeasuredRun) -> str:
    """Return the software stack and era of a run: its framework, and release where notes say it."""
    release = re.match(r"(\d\d\.\d\d)", run.text("notes"))
    if run.source == "mbridge":
        return f"Megatron-Bridge {release.group(1)}" if release else "Megatron-Bridge"
    return ERAS.get(run.source, run.source)


def _batch(run: MeasuredRun, seq: int) -> int | None:
    """Global batch stated, or that of the tokens per step that the notes state."""
    stated = run.integer("gbs")
    tokens = re.search(r"(\d+) tokens per step", run.text("notes"))
    if stated is None and tokens:
        return max(1, int(tokens.group(1)) // seq)
    return stated


def _dtype(precision: str) -> str:
    low = precision.lower()
    for part, dtype in _DTYPES:
        if part in low:
            return dtype
    if "int8" in low:
        return "fp8"
    raise Skip(f"unknown precision {precision}")


def _recompute(text: str) -> str:
    if text.startswith(("none", "no")) and "norm" not in text:
        return "none"
    if "full" in text:
        return "full"
    return "selective"  # single ops, whose repetition costs little


def _zero(text: str) -> int:
    if "fsdp" in text:
        return 2 if "grad_op" in text else 3
    if "distributed optimizer" in text or "zero-1" in text:
        return 1
    stage = re.search(r"zero-(\d)", text)
    return int(stage.group(1)) if stage else 0


def _flash(run: MeasuredRun) -> bool:
    """Fused attention came to these frameworks in 2022; the sources before it have none."""
    return run.source not in ("amp", "bloom", "korth", "sailor", "opt175")


def _stages(run: MeasuredRun) -> tuple[tuple[int, ...], int, int]:
    """Units per stage that the notes state, and how many of them are no layers at either end."""
    text = run.text("notes")
    for pattern, before, after in (
        (r"layers per stage ([\d/]+)", 1, 1),
        (r"pipeline cut \(DeepSpeed module list, \d+ modules\) ([\d/]+)", 3, 3),
    ):
        match = re.search(pattern, text)
        if match:
            return tuple(int(x) for x in match.group(1).split("/")), before, after
    return (), 1, 1
