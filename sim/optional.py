"""Libraries that are not always installed: which extra brings them, and one way to import them."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

import msgspec

from sim.errors import UsageError

__all__ = ["EXTRAS", "Extra", "import_optional", "missing_modules"]


class Extra(msgspec.Struct, frozen=True):
    """One optional dependency set of the distribution.

    Args:
        name: as in ``pip install hetlab[name]``. modules: top-level modules it brings.
        needed_for: what works only with it, in words.
    """

    name: str
    modules: tuple[str, ...]
    needed_for: str


EXTRAS: tuple[Extra, ...] = (
    Extra("search", ("ortools", "optuna", "numba"), "solver and sampler searches"),
    Extra("notebook", ("plotly", "ipywidgets", "jupyterlab", "sklearn"), "the what-if notebooks"),
    Extra("runtime", ("torch", "safetensors"), "executing plans"),
    Extra("tensorboard", ("tensorboard",), "scalars of runs for TensorBoard"),
    Extra("interop", ("google.protobuf", "pyarrow"), "protobuf traces, parquet spans"),
    Extra("ray", ("ray",), "sweeps on a Ray cluster"),
    Extra("dask", ("distributed",), "sweeps on a Dask cluster"),
)


def missing_modules(extra: Extra) -> tuple[str, ...]:
    """Return the modules of an extra that are not installed, without importing any of them."""
    return tuple(m for m in extra.modules if not _is_installed(m))


def import_optional(module: str) -> ModuleType:
    """Import a module that only an extra brings.

    Args:
        module: dotted name, e.g. "ortools.sat.python.cp_model".

    Raises:
        UsageError: it is not installed; the message names the extra to install.
    """
    if not _is_installed(module.split(".")[0]):
        extra = next((e for e in EXTRAS if any(_covers(m, module) for m in e.modules)), None)
        hint = f"; pip install 'hetlab[{extra.name}]'" if extra else ""
        raise UsageError(f"{module} is not installed{hint}")
    return importlib.import_module(module)


def _covers(parent: str, module: str) -> bool:
    return module == parent or module.startswith(parent + ".")


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package of a dotted name is missing
        return False
