from __future__ import annotations

import pytest

from sim.errors import UsageError
from sim.optional import EXTRAS, Extra, import_optional, missing_modules
from sim.settings import Settings, read_settings


def test_no_color_counts_only_when_not_empty():
    assert read_settings({}) == Settings(color=True, debug=False)
    assert read_settings({"NO_COLOR": ""}).color
    assert not read_settings({"NO_COLOR": "1"}).color
    assert read_settings({"HETLAB_DEBUG": "1"}).debug


def test_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setattr("sim.optional.EXTRAS", (Extra("odd", ("no_such_module",), "x"),))
    with pytest.raises(UsageError, match=r"pip install 'hetlab\[odd\]'"):
        import_optional("no_such_module.part")
    assert import_optional("json").loads("1") == 1


def test_missing_modules_of_a_missing_parent():
    assert missing_modules(Extra("a", ("no_such_parent.child", "json"), "")) == (
        "no_such_parent.child",
    )


def test_every_extra_of_the_distribution_is_described():
    from importlib.metadata import metadata

    declared = set(metadata("hetlab").get_all("Provides-Extra") or ()) - {"dev"}
    assert {e.name for e in EXTRAS} == declared
