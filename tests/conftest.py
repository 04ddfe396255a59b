"""Shared test settings: one small, repeatable hypothesis profile."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

# What starts in the background of a shell ignores SIGINT, and so do its children; tests of Ctrl-C
# send it to commands that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "hetlab",
    derandomize=True,
    deadline=None,
    max_examples=40,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("hetlab")
