"""Layer sizes of measured runs' models: a bundled table by name, and the file's own columns."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

import hardware_profiles
from sim.fidelity.runs import MeasuredRun
from sim.fidelity.skip import Skip

__all__ = ["config_of"]

MODELS = "measured_models.json"


@lru_cache(maxsize=1)
def _models() -> dict[str, Any]:
    path = hardware_profiles.folder() / MODELS
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def config_of(run: MeasuredRun, notes: list[str]) -> dict[str, Any]:
    """Return the sizes of a run's model: the known one of its name, with what the columns say.

    Args:
        run: whose model. notes: gets what had to be assumed.

    Raises:
        Skip: no model of that name is known.
    """
    name = re.sub(r"\s*\(.*\)", "", run.text("model"))
    known = _models().get(name)
    if known is None and name.startswith("BLOOM-candidate"):
        known = _models()["BLOOM-candidate"]
    if known is None:
        raise Skip(f"the layer sizes of {name} are not in the file")
    config = dict(known["config"])
    if known["evidence"] == "remembered":
        notes.append(f"sizes of {name}: {known['source']}")
    family = config["model_type"]
    for column, keys in _SIZES.items():
        value = run.integer(column)
        key = next((k for k in keys if k in config), None)
        if value is not None and key is not None:
            config[key] = value
    dense = re.search(r"dense_layers=(\d+)", run.text("notes"))
    if dense:
        config["first_k_dense_replace"] = int(dense.group(1))
    if family == "bloom":
        _bloom(run, config, notes)
    return config


_SIZES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "vocab": ("vocab_size",),
}
"""Column -> keys of a config; kv_heads and ffn come with the known model."""


def _bloom(run: MeasuredRun, config: dict[str, Any], notes: list[str]) -> None:
    """Layers of a candidate from its parameters, and its heads."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    if run.integer("layers") is None:
        pp, count = run.integer("pp") or 1, float(run.text("n_params"))
        layers = max(1, round((count - vocab * hidden) / (12 * hidden**2) / pp)) * pp
        config["num_hidden_layers"] = layers
        notes.append(f"{layers} layers from the parameter count, a multiple of pp")
    if run.integer("heads") is None:
        config["num_attention_heads"] = 64
        notes.append("64 heads, as the lines that repeat a run with its heads say")
