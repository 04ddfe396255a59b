"""Problems of the exercises: measured layer times on ideal chips, communication as stated."""

from __future__ import annotations

from itertools import pairwise

import msgspec

from sim.hardware.machine import Accelerator, Link, Machine, Node
from sim.model.graph import Block, Edge, MeasuredTime, Model
from sim.problem import Problem
from sim.spec.job import Job

FORWARD, BACKWARD = 0.010, 0.020
"""[s] per layer and microbatch."""
FREE = 1e30
"""[B/s] of a link that costs nothing."""


def machine(
    nodes: int,
    chips: int,
    *,
    nics: int = 1,
    nic_rate: float = FREE,
    fabric_rate: float = FREE,
    types: tuple[str, ...] = ("chip",),
) -> Machine:
    """Equal nodes without latency; node i holds accelerators of type ``types[i % len]``."""
    links: list[Link] = []

    def port(name: str, rate: float, kind: str) -> tuple[int, int]:
        links.append(Link(name=f"{name}/out", rate=rate, kind=kind))
        links.append(Link(name=f"{name}/in", rate=rate, kind=kind))
        return len(links) - 2, len(links) - 1

    found = []
    for i in range(nodes):
        found.append(
            Node(
                index=i,
                profile="ideal",
                site="hall",
                island="hall",
                accelerator=types[i % len(types)],
                chips=(i * chips, (i + 1) * chips),
                fabric_rate=fabric_rate,
                nics=nics,
                nic_rate=nic_rate,
                chip_nic=tuple(c * nics // chips for c in range(chips)),
                chip_links=tuple(
                    port(f"node{i}/chip{c}", fabric_rate, "fabric") for c in range(chips)
                ),
                nic_links=tuple(port(f"node{i}/nic{n}", nic_rate, "nic") for n in range(nics)),
            )
        )
    chip = Accelerator(
        name="chip",
        memory_bytes=80e9,
        memory_bytes_per_s=FREE,
        peak_flops_per_s={"bf16": 1e15},
        kernel_overhead_s=0.0,
        context_bytes=0.0,
        allocator_gap=0.0,
    )
    return Machine(
        name="ideal",
        accelerators={t: msgspec.structs.replace(chip, name=t) for t in types},
        nodes=tuple(found),
        links=tuple(links),
        routes={"hall>hall": ()},
    )


def model(
    num_layers: int,
    *,
    hidden: int = 1,
    sequence: int = 1,
    tp: tuple[int, ...] = (1,),
    speeds: dict[str, float] | None = None,
    params: int = 0,
) -> Model:
    """A chain of measured layers; on a type of speed x a layer takes 1/x of the stated time."""
    names = [f"layers.{i}" for i in range(num_layers)]
    return Model(
        name=f"{num_layers} layers",
        family="measured",
        blocks=tuple(
            Block(name=n, kind="measured", layer=i, params=params, input_elements=hidden)
            for i, n in enumerate(names)
        ),
        edges=tuple(Edge(src=a, dst=b, elements=hidden) for a, b in pairwise(names)),
        num_layers=num_layers,
        hidden=hidden,
        max_seq=sequence,
        times=tuple(
            MeasuredTime(
                block=n,
                accelerator=a,
                tp=t,
                microbatch=1,
                forward=FORWARD / x,
                input_grad=BACKWARD / x,
            )
            for n in names
            for a, x in (speeds or {"chip": 1.0}).items()
            for t in tp
        ),
    )


def problem(on: Machine, what: Model, global_batch: int) -> Problem:
    """The problem of training ``what`` on a machine."""
    return Problem(
        machine=on,
        model=what,
        job=Job(global_batch=global_batch, sequence_length=what.max_seq),
        documents={},
        hash="exercise",
    )
