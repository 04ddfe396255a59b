"""Build and route speed on the 1,024-chip bundle: run with --benchmark-enable."""

from __future__ import annotations

from itertools import cycle

from pytest_benchmark.fixture import BenchmarkFixture

from sim.hardware.build import build_machine
from sim.hardware.catalog import bundled_catalog
from sim.hardware.machine import Path
from sim.hardware.route import path


def test_build(benchmark: BenchmarkFixture) -> None:
    doc = bundled_catalog().cluster("h2_1024")
    assert benchmark(build_machine, doc).num_chips == 1024


def test_known_path(benchmark: BenchmarkFixture) -> None:
    machine = build_machine(bundled_catalog().cluster("h2_1024"))
    assert benchmark(path, machine, 3, 900).links


def test_new_path(benchmark: BenchmarkFixture) -> None:
    machine = build_machine(bundled_catalog().cluster("h2_1024"))
    pairs = cycle((src, dst) for src in range(512) for dst in range(512, 1024))

    def next_path() -> Path:
        return path(machine, *next(pairs))

    assert benchmark.pedantic(next_path, rounds=2000, iterations=10).links
