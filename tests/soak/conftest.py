"""Campaigns from a seed under a time limit; `make soak` sets both."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))

BEGAN = time.monotonic()
MINUTES = float(os.environ.get("HETLAB_SOAK_MINUTES") or 30)
# Workers of one session and a repeated campaign must see the same seed.
os.environ["HETLAB_SOAK_SEED"] = os.environ.get("HETLAB_SOAK_SEED") or str(
    int.from_bytes(os.urandom(4), "little")
)


def pytest_report_header() -> str:
    return f"soak: SEED={os.environ['HETLAB_SOAK_SEED']} MINUTES={MINUTES:g}"


def pytest_runtest_setup() -> None:
    if time.monotonic() - BEGAN > 60 * MINUTES:
        pytest.skip(f"the time limit of {MINUTES:g} minutes is over")
