"""Whatever stands in a model file, the reader gives a model or an InputError."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from sim.errors import InputError
from sim.model.count import total_params
from sim.model.load import load_model
from sim.model.sizes import published, published_names
from sim.spec.load import read_source

CONFIGS = Path(__file__).parents[1] / "data" / "hf_configs"
WHOLE = [read_source(file).data for file in sorted(CONFIGS.glob("*.json"))]
WHOLE += [dict(published(name).data) for name in published_names()[::6]]  # type: ignore[union-attr]

junk = st.one_of(
    st.none(), st.booleans(), st.floats(), st.text(max_size=6),
    st.integers(-3, 3), st.integers(), st.sampled_from([0, 2**41, 10**30, 7, 64, 4096]),
    st.lists(st.one_of(st.integers(0, 3), st.lists(st.integers())), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=1),
)  # fmt: skip


def keys_of(data: dict[str, Any]) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for key, value in data.items():
        found.append((key,))
        if isinstance(value, dict):
            found += [(key, *below) for below in keys_of(value)]
    return found


@settings(max_examples=250, deadline=None)
@given(st.sampled_from(WHOLE), st.data())
def test_a_changed_model_file_is_read_or_refused(whole: dict[str, Any], data: Any) -> None:
    changed = copy.deepcopy(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(keys_of(changed)))
        at = changed
        for key in path[:-1]:
            at = at[key]
        if data.draw(st.booleans()):
            at[path[-1]] = data.draw(junk)
        else:
            del at[path[-1]]
        if not changed:
            return
    layers = changed.get("num_hidden_layers", 0)
    if isinstance(layers, int) and layers > 200:
        changed["num_hidden_layers"] = 10**6
    try:
        model = load_model(changed)
    except InputError as error:
        assert str(error)
    else:
        assert total_params(model) > 0
