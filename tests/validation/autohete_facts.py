"""Boundary facts of AutoHete's paper against the memory ledger: closed form, nothing simulated.

A prediction is held against the bare size of the memory (40 GB of a chip, 440 GB of the host): a
fact says where a run really failed, so the margin that plans leave for errors is not applied. The
sizes of the models are our guesses (``autohete_cases.MODELS``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from sim.cost.ledger import knobs_of, peak_memory
from sim.cost.offload import host_ledgers
from sim.plan.lower import lower
from sim.plan.plan import Plan
from sim.problem import Problem
from strategies.compose import compose
from strategies.offload.autohete import AutoHeteKnobs
from strategies.offload.policies import POLICIES
from tests.validation.autohete_cases import MODELS, Given, case

__all__ = [
    "CHIP_GB",
    "HOST_GB",
    "Fact",
    "chip_terms",
    "fact_lines",
    "facts",
    "host_terms",
    "least_optimizer",
    "most_batch",
    "most_layers",
    "needs",
    "params",
    "variant_lines",
]

CHIP_GB, HOST_GB = 40.0, 440.0
BUFFER_FACTOR = 1.5
"""DeepSpeed's own estimate of host memory is 16 B a parameter times this "to be conservative"
(https://deepspeed.readthedocs.io/en/latest/memory.html, ZeRO-3 with the optimizer offloaded)."""
VARIANTS: dict[str, Given] = {
    "as stated": {},
    "fused attention": {"flash": True},
    "fp32 gradients": {"gradients": "fp32"},
}


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """A boundary that the paper reports, and the ledger's.

    Args:
        published: what was found. ours: what the ledger says. holds: they agree.
        note: what decides.
    """

    published: str
    ours: str
    holds: bool
    note: str = ""


def _plan(
    sizes: tuple[int, int], knobs: AutoHeteKnobs | None, given: Given
) -> tuple[Plan, Problem]:
    problem, start = case(*sizes, **given)
    if knobs is None:
        base = AutoHeteKnobs(checkpointed=sizes[1])
        knobs = next(iter(POLICIES["zero-offload"].candidates(problem, base)))
    return lower(problem, compose(problem, [("offload", knobs)], start=start)), problem


def chip_terms(
    sizes: tuple[int, int], knobs: AutoHeteKnobs | None = None, given: Given | None = None
) -> dict[str, float]:
    """Return the terms on a chip [GB].

    Args:
        sizes: hidden size, layers. knobs: None for ZeRO-Offload with all layers recomputed.
        given: of ``case``.
    """
    plan, problem = _plan(sizes, knobs, given or {})
    return {k: v / 1e9 for k, v in peak_memory(plan, problem)[0, 0].terms.items()}


def host_terms(
    sizes: tuple[int, int], knobs: AutoHeteKnobs | None = None, given: Given | None = None
) -> dict[str, float]:
    """Return the terms in host memory [GB]; arguments as of ``chip_terms``."""
    plan, problem = _plan(sizes, knobs, given or {})
    return {k: v / 1e9 for k, v in host_ledgers(plan, problem, knobs_of)[0].terms.items()}


def needs(
    sizes: tuple[int, int], knobs: AutoHeteKnobs | None = None, given: Given | None = None
) -> float:
    """Return what a chip needs [GB]; arguments as of ``chip_terms``."""
    return sum(chip_terms(sizes, knobs, given).values())


def params(sizes: tuple[int, int]) -> float:
    """Return the parameters of a model, tied ones once, in 1e9."""
    return host_terms(sizes)["optimizer"] / 12


def most_batch(sizes: tuple[int, int], given: Given | None = None) -> int:
    """Return the largest batch at which ZeRO-Offload fits one chip; 0 for none."""
    most = 0
    while needs(sizes, given={**(given or {}), "batch": most + 1}) <= CHIP_GB:
        most += 1
    return most


def most_layers(hidden: int, given: Given | None = None) -> int:
    """Return the most layers of this size with which ZeRO-Offload fits one chip."""
    most = 0
    while needs((hidden, most + 1), given=given) <= CHIP_GB:
        most += 1
    return most


def least_optimizer(sizes: tuple[int, int], outer: bool = False) -> int:
    """Return how few layers' optimizer states leave the chip when all layers are recomputed.

    Args:
        sizes: hidden size, layers. outer: those of embedding and head leave it as well.
    """
    for o in range(sizes[1] + 1):
        knobs = AutoHeteKnobs(checkpointed=sizes[1], optimizer=o, outer=outer)
        if needs(sizes, knobs) <= CHIP_GB:
            return o
    return sizes[1] + 1


def facts() -> Iterator[Fact]:
    """Every boundary that was found, in the order of the sheet."""
    layers = most_layers(5120)
    plain = needs(MODELS["2B"], AutoHeteKnobs(optimizer=MODELS["2B"][1], outer=True))
    yield Fact(
        published="ZeRO-Offload, 1 GPU: out of GPU memory beyond 12B",
        ours=f"12B needs {needs(MODELS['12B']):.1f} GB, 15B {needs(MODELS['15B']):.1f}; most at "
        f"hidden 5120: {layers} layers, {params((5120, layers)):.1f}B",
        holds=needs(MODELS["12B"]) <= CHIP_GB < needs(MODELS["15B"]),
        note=f"all layers recomputed; without, 2B already needs {plain:.1f} GB",
    )
    yield _host_fact()
    found = {outer: least_optimizer(MODELS["4B"], outer) for outer in (False, True)}
    yield Fact(
        published="plan of 4B: optimizer states of 13 of 21 blocks on the host",
        ours=f"at least {found[False]} of 20 layers with all recomputed and parameters on the "
        f"chip; {found[True]} if embedding and head leave too",
        holds=found[False] == 13,
        note="what memory forces; the planner chooses 13 too at 0.75 ns a parameter",
    )
    for name, batch in (("6B", 24), ("10B", 12)):
        most = most_batch(MODELS[name])
        yield Fact(
            published=f"ZeRO-Offload, {name}: out of memory above batch {batch}",
            ours=f"above {most}; {batch} needs "
            f"{needs(MODELS[name], given={'batch': batch}):.1f} GB, {batch + 4} needs "
            f"{needs(MODELS[name], given={'batch': batch + 4}):.1f}",
            holds=batch <= most < batch + 4,
            note="steps of 4 in the paper's sweep are our reading",
        )
    for name, least in (("4B", 16.0), ("6B", 24.0)):
        terms = chip_terms(MODELS[name])
        total = sum(terms.values())
        yield Fact(
            published=f"ZeRO-Offload, {name}: fails below {least:.0f} GB",
            ours=f"needs {total:.1f} GB, {total - least:+.1f}",
            holds=least - 4 < total <= least,
            note=f"parameters {terms['parameters']:.1f}, logits {terms['logits']:.1f}, "
            f"context and gap {terms['context'] + terms['allocator gap']:.1f}",
        )
    for name in ("4B", "6B"):
        n = MODELS[name][1]
        knobs = AutoHeteKnobs(checkpointed=n, parameters=n, optimizer=n, outer=True)
        away = needs(MODELS[name], knobs)
        stays = needs(MODELS[name], msgspec.structs.replace(knobs, outer=False))
        yield Fact(
            published=f"AutoHete, {name}: runs with 12 GB (it is faster there than rivals with 40)",
            ours=f"at least {away:.1f} GB; {stays:.1f} with embedding and head on the chip",
            holds=away <= 12,
        )


def _host_fact() -> Fact:
    """Host memory of ZeRO-Offload on 4 chips.

    ZeRO-3, as found of the 4-chip runs: ZeRO-1 and 2 keep whole parameters on every chip.
    """
    four: Given = {"chips": 4, "zero": 3}
    total = {n: sum(host_terms(MODELS[n], given=four).values()) for n in ("18B", "22B")}
    size = params(MODELS["22B"])
    return Fact(
        published="ZeRO-Offload, 4 GPU: out of CPU memory at 22B",
        ours=f"22B needs {total['22B']:.0f} GB of 440 at {total['22B'] / size:.0f} B a parameter; "
        f"{HOST_GB / size:.1f} B would fill it",
        holds=total["22B"] > HOST_GB,
        note=f"times DeepSpeed's factor {BUFFER_FACTOR}: {BUFFER_FACTOR * total['22B']:.0f} GB "
        f"(18B {BUFFER_FACTOR * total['18B']:.0f}); with fp32 gradients besides, 20 B: "
        f"{20 * size:.0f}. Under ZeRO-2 a chip would need "
        f"{needs(MODELS['22B'], given={'chips': 4, 'zero': 2}):.0f} GB, under ZeRO-3 "
        f"{needs(MODELS['22B'], given=four):.0f}",
    )


def fact_lines(found: Iterable[Fact]) -> Iterator[str]:
    """The facts as text, then how the boundaries move with what we had to choose."""
    yield "published: of arXiv:2503.01890 as a third-party digest gives it; hidden size and layers"
    yield "of every model are our guesses within its ranges"
    yield "boundary facts, published and ours (closed form)"
    for f in found:
        yield f"{'holds ' if f.holds else 'MISSED'}  {f.published}"
        yield f"        {f.ours}"
        if f.note:
            yield f"        ({f.note})"
    yield from variant_lines()


def variant_lines() -> Iterator[str]:
    """One line a variant of what we had to choose."""
    heads = ("most params", "batch 6B", "batch 10B", "GB 4B", "GB 6B", "GB 12B")
    yield f"{'ZeRO-Offload':<18}" + "".join(f"{h:>13}" for h in heads)
    cells = ("12B", "24", "12", "16", "24", "up to 40")
    yield f"{'published':<18}" + "".join(f"{c:>13}" for c in cells)
    for name, given in VARIANTS.items():
        layers = most_layers(5120, given)
        numbers = [f"{params((5120, layers)):.1f}B"]
        numbers += [str(most_batch(MODELS[m], given)) for m in ("6B", "10B")]
        numbers += [f"{needs(MODELS[m], given=given):.1f}" for m in ("4B", "6B", "12B")]
        yield f"{name:<18}" + "".join(f"{n:>13}" for n in numbers)
