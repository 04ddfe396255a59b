"""AutoHete's qualitative facts on one GPU: less memory than the baselines, and larger batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from strategies.offload.autohete import AutoHeteKnobs
from strategies.offload.policies import Outcome, run_policy
from tests.validation.autohete_cases import BASELINES, MODELS, Given, case
from tests.validation.autohete_runs import SHEET_EFFICIENCY, planned

__all__ = ["Small", "batch_lines", "batches", "small", "small_lines"]

BATCHES = {"6B": (2, 4, 8, 16, 24, 32), "10B": (2, 4, 8, 12, 16)}
"""[sequences] of the batch sweeps; which ones the paper took was not found."""


class Small(msgspec.Struct, frozen=True, kw_only=True):
    """AutoHete with little memory against baselines with all of it.

    Args:
        model: name in ``MODELS``. ours: AutoHete's plan. others: baseline -> its plan.
    """

    model: str
    ours: Outcome
    others: dict[str, Outcome]

    def ratio(self, name: str) -> float:
        """AutoHete's throughput over a baseline's."""
        return self.others[name].step_s / self.ours.step_s


def small(model: str, update_ns: float, memory: float = 12.0) -> Small:
    """Plan AutoHete for ``memory`` GB and run the baselines with 40.

    Args:
        model: name in ``MODELS``. update_ns: of ``case``. memory: [GB].
    """
    given: Given = {"update_ns": update_ns, "efficiency": SHEET_EFFICIENCY}
    ours = planned(model, AutoHeteKnobs(), {**given, "memory": memory}).best
    others = {name: run_policy(*case(*MODELS[model], **given), name) for name in BASELINES}
    return Small(model=model, ours=ours, others=others)


def small_lines(updates: Sequence[float]) -> Iterator[str]:
    """AutoHete with 12 GB; published: faster than all three given 40 GB (4B, 6B)."""
    yield "AutoHete with 12 GB over baselines with 40; published: above 1 for all three"
    yield f"{'ns':<7}{'model':<7}" + "".join(f"{name:>14}" for name in BASELINES)
    for u in updates:
        for model in ("4B", "6B"):
            found = small(model, u)
            cells = "".join(f"{found.ratio(name):>14.2f}" for name in BASELINES)
            yield f"{u:<7}{model:<7}{cells}"


def batches(model: str, update_ns: float) -> dict[int, Outcome]:
    """Plan AutoHete for every batch of ``BATCHES``; arguments as of ``small``."""
    given: Given = {"update_ns": update_ns, "efficiency": SHEET_EFFICIENCY}
    return {b: planned(model, AutoHeteKnobs(), {**given, "batch": b}).best for b in BATCHES[model]}


def batch_lines(updates: Sequence[float]) -> Iterator[str]:
    """Sequences per second over the batch; published: rises, then flattens."""
    yield "AutoHete, sequences/s (layers with optimizer on the host) by batch; published: rises,"
    yield "then flattens"
    for model, sizes in BATCHES.items():
        yield f"{model:<7}{'ns':<6}" + "".join(f"{b:>13}" for b in sizes)
        for u in updates:
            cells = ""
            for b, found in batches(model, u).items():
                rate = "-" if found.short else f"{b / found.step_s:.2f} ({found.knobs.optimizer})"
                cells += f"{rate:>13}"
            yield f"{'':<7}{u:<6}{cells}"
