"""AutoHete's published ratios and ours: ``python -m tests.validation.autohete_tables``.

Options: ``--gpus 1|4``, ``--update NS`` (several allowed), ``--models 2B,4B``, ``--efficiency X``,
``--batch N``, ``--facts`` for the boundary facts only, ``--sweeps`` for little memory and large
batches, ``--llama`` for measured runs of LLaMA-7B. Nothing is written.
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
    SHEET_EFFICIENCY,
    UPDATES,
    VARIANTS,
    Row,
    rows,
    summary,
)
from tests.validation.autohete_sweeps import batch_lines, small_lines
from tests.validation.llama_offload import table_lines


def row_lines(found: Sequence[Row]) -> Iterator[str]:
    """One line a model: AutoHete's step and plan, and the ratio to everybody else."""
    names = (*BASELINES, *VARIANTS)
    heads = "".join(f"{name:>14}" for name in names)
    yield f"{'model':<6}{'step s':>8}  {'(c, p, o) of layers':<22}{heads}"
    for r in found:
        ours = r.found[AUTOHETE]
        k = ours.knobs
        counts = f"{k.checkpointed}, {k.parameters}, {k.optimizer} of {MODELS[r.model][1]}"
        plan = ours.short or counts + " +ends" * k.outer + " ?" * (not r.proven)
        cells = (f"{r.ratio(n):.2f}" if r.ratio(n) else _lacks(r.found[n]) for n in names)
        yield f"{r.model:<6}{ours.step_s:>8.3f}  {plan:<22}" + "".join(f"{c:>14}" for c in cells)


def _lacks(outcome: Outcome) -> str:
    return {"accelerator memory": "no GPU mem", "host memory": "no CPU mem"}.get(outcome.short, "-")


def summary_lines(found: Sequence[Row], gpus: int) -> Iterator[str]:
    """Average and largest ratio per update constant beside the published ones."""
    updates = sorted({r.given["update_ns"] for r in found})
    heads = "".join(f"{f'{u} ns':>14}" for u in updates)
    yield f"{'rival':<14}{'published':>14}{heads}"
    for name in (*BASELINES, *VARIANTS):
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
    tasks: list[tuple[str, Given]] = []
    for u in updates:
        given: Given = {"update_ns": u, "efficiency": asked.efficiency, "batch": asked.batch}
        if asked.gpus > 1:
            given |= {"chips": asked.gpus, "zero": 3}
        tasks += [(model, given) for model in asked.models.split(",")]
    found: list[Row] = []
    for row in rows(tasks):
        found.append(row)
        if row.model != tasks[-1][0]:
            continue
        now = row.given["update_ns"]
        print(
            f"\n{asked.gpus} GPU, batch {asked.batch}, {now} ns a parameter, products at {asked.efficiency} of peak;"
        )
        print(
            "AutoHete's step and plan (? unproven, +ends: embedding and head too), and its ratio to"
        )
        print(*row_lines([r for r in found if r.given["update_ns"] == now]), sep="\n", flush=True)
    print("\nthroughput ratio, average / largest")
    print(*summary_lines(found, asked.gpus), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
