"""Measured values <-> step times, by each source's own count of FLOPs and its denominator.

Counts (all exact to half a per cent on the runs whose token rate is printed too): "causal" is three
times the forward work with half the score matrix, "full" with the whole of it, "6N" the parameters
alone, "8N" with recomputation.
"""

from __future__ import annotations

from sim.cost.ledger import Ledger
from sim.errors import InputError
from sim.fidelity.predict import Predicted
from sim.fidelity.runs import MeasuredRun, MeasuredValue
from sim.fidelity.settings import NOT_TIMED, Settings
from sim.fidelity.skip import Skip
from sim.model.amounts import attention_flops, forward_flops
from sim.model.count import active_params, total_params
from sim.model.graph import Model

__all__ = ["TIME_LIKE", "counted_flops", "memory_of", "predicted_value", "step_of"]

TIME_LIKE = (
    "step_time", "tokens_per_s_per_chip", "sequences_per_s", "samples_per_s", "throughput",
    "model_tflops_per_chip", "hardware_tflops_per_chip", "mfu_percent", "hfu_percent",
)  # fmt: skip
"""Metrics that say how long a step takes; where a run has several, the first counts."""
_COUNTS = {
    "tpurec": "full", "foundry": "full", "flagperf": "6N", "colossal": "8N", "bloom": "bloom",
}  # fmt: skip
_MTP = 1.041
"""DeepSeek-V3 counts its layer that predicts a further token, which no plan here holds."""
_OSS = {"before": 27.2e9, "since": 32.6e9}
"""[FLOP/token] that Megatron-Bridge prints for GPT-OSS; it changed at 26.06."""
GIB = 2**30


def counted_flops(run: MeasuredRun, s: Settings, model: Model, metric: str) -> float:
    """Return the FLOPs of a step as the run's source counts them [FLOP].

    Args:
        run, s: of the run. model: its blocks. metric: which value.
    """
    tokens = float(s.gbs) * s.seq
    if run.source in ("mbridge",) and s.model.startswith("GPT OSS"):
        return tokens * _OSS["since" if s.stack.split()[-1] >= "26.06" else "before"]
    forward = sum(forward_flops(b, tokens, s.seq) for b in model.blocks)
    core = sum(attention_flops(b, tokens, s.seq) for b in model.blocks)
    how = _COUNTS.get(run.source, "causal")
    if how == "6N":
        stated = run.integer("n_params")
        weights = active_params(model) if s.moe or not stated else stated
        return 6.0 * weights * tokens
    if how == "8N":
        return 8.0 * total_params(model) * tokens
    if how == "full":
        again = 4 / 3 if metric == "hfu_percent" and s.recompute == "full" else 1.0
        return 3.0 * (forward + core) * again
    if how == "bloom":
        return 4.0 * forward
    mtp = s.model.startswith("DeepSeek-V3") and "w/o MTP" not in run.text("notes")
    return 3.0 * forward * (_MTP if mtp and run.source in ("mbridge", "ironwood") else 1.0)


def _denominator(run: MeasuredRun, s: Settings, peaks: dict[str, float]) -> float:
    """Peak of all chips that the run's utilisation is a share of [FLOP/s]."""
    dtype = s.dtype
    if run.source == "flagperf":  # prints shares of the 16-bit peak, its fp32 row of the tf32 one
        dtype = s.dtype if s.dtype == "tf32" else "bf16"
    for name in (dtype, "bf16", "fp16", "fp32"):
        if name in peaks:
            return peaks[name]
    raise InputError("a chip without peaks", key=run.run_id)


def step_of(run: MeasuredRun, value: MeasuredValue, s: Settings, p: Predicted) -> float:
    """Return the step time that a measured value amounts to [s].

    Raises:
        Skip: the value is not positive, or says nothing about a step.
    """
    if value.metric not in TIME_LIKE:
        raise Skip(f"{value.metric} is no time")
    if value.value <= 0:
        raise Skip(f"{value.metric} is not positive")
    if value.metric == "step_time":
        return value.value * (1e-3 if value.unit == "ms" else 1.0)
    return _constant(run, value.metric, s, p) / value.value


def predicted_value(run: MeasuredRun, value: MeasuredValue, s: Settings, p: Predicted) -> float:
    """Return what is predicted for a time-like metric, in the metric's own unit."""
    if value.metric == "step_time":
        return p.step_s * (1e3 if value.unit == "ms" else 1.0)
    return _constant(run, value.metric, s, p) / p.step_s


def _constant(run: MeasuredRun, metric: str, s: Settings, p: Predicted) -> float:
    """Value times step time: what a run does in a step, in the metric's unit."""
    n = s.num_chips
    if metric == "tokens_per_s_per_chip":
        return float(s.gbs) * s.seq / n
    if metric == "throughput":
        return float(s.gbs) * s.seq
    if metric in ("sequences_per_s", "samples_per_s"):
        return float(s.gbs)
    flops = counted_flops(run, s, p.model, metric)
    if metric in ("model_tflops_per_chip", "hardware_tflops_per_chip"):
        return flops / n / 1e12
    return 100.0 * flops / _denominator(run, s, p.peaks)


def memory_of(run: MeasuredRun, p: Predicted) -> tuple[float, float] | None:
    """Return (measured, predicted) peak [B], allocated against allocated; None without a reading.

    Readings of nvidia-smi (flagperf, titan) hold the allocator's reserve and the context; the
    others are what the allocator gave out. BLOOM's logs give the first and last node.
    """
    for value in run.values:
        if "memory" not in value.metric or value.metric in NOT_TIMED:
            continue
        if value.metric == "fits_in_memory":
            continue
        measured = value.value * (GIB if value.unit == "GiB" else 1e9)
        whole = run.source in ("flagperf", "titan", "bloom", "primus")
        stages = list(p.ledgers)
        if value.metric == "peak_memory_first_last_node":
            stages = [stages[0], stages[-1]]
        return measured, max(_peak(p.ledgers[x], whole) for x in stages)
    return None


def _peak(ledger: Ledger, whole: bool) -> float:
    apart = () if whole else ("allocator gap", "context")
    return sum(v for k, v in ledger.terms.items() if k not in apart)
