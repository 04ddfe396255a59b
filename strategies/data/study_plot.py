"""Pictures of the study: ways of training side by side, and fixed delays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from strategies.data.cosim_task import at_training_loss
from strategies.data.study import Outcome, common_loss
from strategies.data.study_delays import DelayRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_delays", "draw_study"]


def draw_study(outcomes: Sequence[Outcome], loss: float | None = None) -> Figure:
    """Four panels: loss over time, delays of each worker, speed, gap at equal training loss.

    Args:
        outcomes: of ``study``. loss: training loss of the last panel; None for ``common_loss``.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 7.5), layout="constrained")
    (left, right), (low_left, low_right) = figure.subplots(2, 2)
    goal = common_loss(outcomes) if loss is None else loss
    colors = [f"C{i}" for i in range(len(outcomes))]
    _losses(left, outcomes, colors, goal)
    _delays(right, outcomes, colors)
    _speeds(low_left, outcomes, colors)
    _gaps(low_right, outcomes, colors, goal)
    return figure


def draw_delays(rows: Sequence[DelayRow]) -> Figure:
    """Three panels: training loss over updates, gap over updates, gap over training loss."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.0, 4.0), layout="constrained")
    first, second, third = figure.subplots(1, 3)
    for i, row in enumerate(rows):
        label = f"delay {row.tau}"
        first.plot(row.updates, row.train, color=f"C{i}", label=label)
        # Runs without delay lie close to the late ones: on top of all that are drawn pale.
        second.plot(row.updates, row.gap, color=f"C{i}", label=label, linewidth=4.0, alpha=0.35)
        second.plot(row.updates, row.prompt_gap, color=f"C{i}", linestyle=":", zorder=3.0)
        third.plot(row.train, row.gap, color=f"C{i}", label=label)
    first.set(xlabel="updates", ylabel="training loss", title="rate 1/(20 mu (delay + 1))")
    second.set(xlabel="updates", ylabel="gap", title="pale: late; dotted: no delay, same rate")
    third.set(xlabel="training loss", ylabel="gap", title="at equal training loss")
    third.invert_xaxis()
    first.legend(fontsize="small")
    return figure


def _losses(axes: Axes, outcomes: Sequence[Outcome], colors: Sequence[str], goal: float) -> None:
    for o, color in zip(outcomes, colors, strict=True):
        axes.plot(o.training.times, o.training.train, color=color, label=o.name)
        axes.plot(o.training.times, o.training.test, color=color, linestyle="--")
    axes.axhline(goal, color="0.6", linewidth=0.8)
    axes.set(
        xlabel="simulated time [s]",
        ylabel="loss",
        yscale="log",
        title="learner's loss: train solid, test dashed",
    )
    axes.legend(fontsize="small")


def _delays(axes: Axes, outcomes: Sequence[Outcome], colors: Sequence[str]) -> None:
    """A dot for each delay of each worker; its area is the share of the worker's updates."""
    each = zip(outcomes, colors, strict=True)
    served = [(o.name, late, c) for o, c in each if (late := o.timing.delays)]
    for i, (name, late, color) in enumerate(served):
        for worker, histogram in late.worker_histogram.items():
            at = worker + 0.8 * ((i + 0.5) / len(served) - 0.5)
            total = sum(histogram.values())
            sizes = [200.0 * n / total for n in histogram.values()]
            axes.scatter([at] * len(sizes), list(histogram), s=sizes, color=color, alpha=0.7)
        axes.scatter([], [], color=color, label=f"{name}: mean {late.mean:.2f}, max {late.max}")
    workers = range(max((len(o.timing.workers) for o in outcomes), default=0))
    axes.set_xticks(list(workers))
    axes.set(xlabel="worker", ylabel="delay [updates]", title="delays of servers' updates")
    if served:
        axes.legend(fontsize="small")


def _speeds(axes: Axes, outcomes: Sequence[Outcome], colors: Sequence[str]) -> None:
    for i, (o, color) in enumerate(zip(outcomes, colors, strict=True)):
        for k, value in enumerate((o.timing.updates_per_s, o.timing.samples_per_s)):
            at = k + 0.8 * ((i + 0.5) / len(outcomes) - 0.5)
            axes.bar(at, value, 0.8 / len(outcomes), color=color)
            axes.text(at, value, f"{value:.2g}", ha="center", va="bottom", fontsize=7)
    axes.set_xticks([0, 1], ["updates/s", "samples/s"])
    axes.set(yscale="log", ylabel="rate [1/s]", title="speed, per simulated second")


def _gaps(axes: Axes, outcomes: Sequence[Outcome], colors: Sequence[str], goal: float) -> None:
    for i, (o, color) in enumerate(zip(outcomes, colors, strict=True)):
        end = float(o.training.test[-1] - o.training.train[-1])
        axes.bar(i + 0.2, end, 0.4, color=color, alpha=0.35)
        at = at_training_loss(o.training, goal)
        if at is not None:
            axes.bar(i - 0.2, at.test - at.train, 0.4, color=color)
    axes.axhline(0.0, color="0.6", linewidth=0.8)
    axes.set_xticks(range(len(outcomes)), [o.name.replace(" ", "\n") for o in outcomes])
    axes.set(
        ylabel="test - train loss",
        title=f"gap at training loss {goal:.3g}; pale: at the end of time",
    )
