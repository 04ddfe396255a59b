"""AutoHete's published ratios and ours: ``python -m tests.validation.autohete_tables``.

Options: ``--gpus 1|4``, ``--update NS`` (several allowed), ``--models 2B,4B``, ``--efficiency X``,
``--batch N``, ``--facts`` for the boundary facts only, ``--sweeps`` for little memory and large
batches, ``--llama`` for measured runs of LLaMA-7B. Nothing is written.

What it shows on one GPU: no single update constant gives all four published averages.
ZeRO-Offload and PatrickStar fit near 0.33 ns, StrongHold near 0.6, the scheduler at 0.75, where
the plan of 4B is the published one. On 4 GPUs the stated batch of 8 lets small models fit without
the host, and the ratios far exceed the published ones; 8 a GPU (``--batch 32``, our reading) fits
near 0.6 ns.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

from strategies.offload.policies import Outcome
from tests.validation.autohete_cases import BASELINES, MODELS, PUBLISHED, Given
from tests.validation.autohete_facts import fact_lines, facts
from tests.validation.autohete_runs import (
    AUTOHETE,
    MOST,
    SHEET_EFFICIENCY,
    UPDATES,
    VARIANTS,
    Row,
    rows,
    summary,
)
from tests.validation.autohete_sweeps import batch_lines, small_lines
from tests.validation.llama_offload import table_lines

CLOSE = 0.01
"""A plan that no other beats by more than this share is not marked."""


def row_lines(found: Sequence[Row]) -> Iterator[str]:
    """One line a model: AutoHete's step and plan, and the ratio to everybody else."""
    names = [n for n in (*BASELINES, *VARIANTS) if n in found[0].found]
    heads = "".join(f"{name:>14}" for name in names)
    yield f"{'model':<6}{'step s':>8}  {'(c, p, o) of layers':<22}{heads}"
    for r in found:
        ours = r.found[AUTOHETE]
        k = ours.knobs
        counts = f"{k.checkpointed}, {k.parameters}, {k.optimizer} of {MODELS[r.model][1]}"
        plan = ours.short or counts + " +ends" * k.outer + _mark(r, AUTOHETE)
        cells = (
            f"{r.ratio(n):.2f}{_mark(r, n)}" if r.ratio(n) else _lacks(r.found[n]) for n in names
        )
        yield f"{r.model:<6}{ours.step_s:>8.3f}  {plan:<22}" + "".join(f"{c:>14}" for c in cells)


def _mark(row: Row, name: str) -> str:
    return " ~" if row.gaps.get(name, 0.0) > CLOSE else ""


def _lacks(outcome: Outcome) -> str:
    return {"accelerator memory": "no GPU mem", "host memory": "no CPU mem"}.get(outcome.short, "-")


def summary_lines(found: Sequence[Row], gpus: int) -> Iterator[str]:
    """Average and largest ratio per update constant beside the published ones."""
    updates = sorted({r.given["update_ns"] for r in found})
    heads = "".join(f"{f'{u} ns':>14}" for u in updates)
    yield f"{'rival':<14}{'published':>14}{heads}"
    for name in (n for n in (*BASELINES, *VARIANTS) if n in found[0].found):
        published = PUBLISHED[gpus].get(name)
        cells = [f"{published[0]:.2f} / {published[1]:.2f}" if published else ""]
        for u in updates:
            mean, most = summary((r for r in found if r.given["update_ns"] == u), name)
            cells.append(f"{mean:.2f} / {most:.2f}")
        yield f"{name:<14}" + "".join(f"{c:>14}" for c in cells)


def main(args: Sequence[str]) -> None:
    """Print the tables that the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, choices=(1, 4), default=1)
    parser.add_argument("--update", type=float, action="append", help="[ns] per parameter")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--efficiency", type=float, default=SHEET_EFFICIENCY)
    parser.add_argument("--facts", action="store_true")
    parser.add_argument("--most", type=int, default=MOST, help="choices a search simulates")
    parser.add_argument("--batch", type=int, default=8, help="global [sequences]")
    parser.add_argument("--sweeps", action="store_true")
    parser.add_argument("--llama", action="store_true")
    asked = parser.parse_args(args)
    if asked.llama:
        print(*table_lines(), sep="\n")
        return
    print(*fact_lines(facts()), sep="\n")
    if asked.facts:
        return
    updates = asked.update or UPDATES
    if asked.sweeps:
        print("", *small_lines(updates), "", *batch_lines(updates), sep="\n")
        return
    throughput(
        asked.models.split(","), updates, asked.gpus, asked.batch, asked.efficiency, asked.most
    )


def throughput(
    models: Sequence[str],
    updates: Sequence[float],
    gpus: int,
    batch: int,
    efficiency: float,
    most: int,
) -> None:
    """Print a table per update constant, then the ratios beside the published ones."""
    tasks: list[tuple[str, Given]] = []
    for u in updates:
        given: Given = {"update_ns": u, "efficiency": efficiency, "batch": batch}
        if gpus > 1:
            given |= {"chips": gpus, "zero": 3}
        tasks += [(model, given) for model in models]
    found: list[Row] = []
    for row in rows(tasks, most):
        found.append(row)
        if len(found) % len(models):
            continue
        now = row.given["update_ns"]
        print(
            f"\n{gpus} GPU, batch {batch}, {now} ns a parameter, products at {efficiency} of peak;"
        )
        print(
            "AutoHete's step and plan (~ might be over 1 % faster, +ends: outer), and its ratio to"
        )
        print(*row_lines(found[-len(models) :]), sep="\n", flush=True)
    print("\nthroughput ratio, average / largest")
    print(*summary_lines(found, gpus), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
