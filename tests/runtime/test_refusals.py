"""What the runtime does not run is refused by name before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from real_runtime.errors import UnsupportedPlanError
from real_runtime.support import check_supported
from sim.plan.kinds import KINDS, Kind
from sim.plan.plan import Call, Mathematics, Plan, ProgramText, Table

sys.path.insert(0, str(Path(__file__).parent))
import plans


def changed(plan: Plan, **fields: Any) -> Plan:
    return msgspec.structs.replace(plan, **fields)


def plan() -> Plan:
    return plans.plan_of(plans.problem_of(), [[1], [1]])


def test_a_plan_of_the_built_in_passes_is_supported() -> None:
    assert check_supported(plan()).model.family == "llama"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"exact": False, "reason": "late gradients"}, "changes the mathematics; found late"),
        ({"mathematics": Mathematics(zero=2)}, "ZeRO stage; found 2"),
        ({"mathematics": Mathematics(optimizer="lion")}, "optimizer; found lion"),
        ({"tables": {"load": Table(values={"a": [1]})}}, "late amounts; found load"),
        ({"problem": {}}, "carries no problem"),
    ],
)
def test_features_are_refused_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedPlanError, match=words):
        check_supported(changed(plan(), **fields))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cp": 2}, "context parallelism; found 2"),
        ({"offload": "optimizer"}, "offload"),
        ({"tp": 3}, "split of num_attention_heads 4 over tp; found 3"),
    ],
)
def test_cells_are_refused_by_name(changes: dict[str, Any], words: str) -> None:
    placement = plan().placement
    cell = msgspec.structs.replace(placement.cells[0], **changes)
    placement = msgspec.structs.replace(placement, cells=(cell, *placement.cells[1:]))
    with pytest.raises(UnsupportedPlanError, match=words):
        check_supported(changed(plan(), placement=placement))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"model_type": "gemma"}, "model family; found gemma"),
        ({"model_type": "mistral", "sliding_window": 8}, "sliding windows; found 8"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rotary positions; found yarn"),
        ({"hidden_act": "gelu"}, "activation; found gelu"),
    ],
)
def test_models_are_refused_by_name(model: dict[str, Any], words: str) -> None:
    odd = plans.plan_of(plans.problem_of(**model), [[1], [1]])
    with pytest.raises(UnsupportedPlanError, match=words):
        check_supported(odd)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("repeat(steps){ F0.0 F0.1 B0.0 B0.1 OPT }", "part of a microbatch; found F0.0"),
        ("once{ F0 } repeat(steps){ F1 B1 }", "several blocks; found once repeat"),
        ("repeat(2){ F0 B0 OPT }", r"repeat; found repeat\(2\)"),
        ("repeat(steps){ F0 B0 ^1 OPT }", "carried over a step; found OPT"),
        ("repeat(steps){ F0 B0 ALL_REDUCE:tp OPT }", "collective; found ALL_REDUCE"),
        ("repeat(steps){ F0 B0 D2H OPT }", "no handler .*; found D2H"),
    ],
)
def test_programs_are_refused_by_name(text: str, words: str) -> None:
    one = plans.plan_of(plans.problem_of(), [[2]], microbatches=(1,), microbatch=8)
    written = (ProgramText((0, 1), text),)
    with pytest.raises(UnsupportedPlanError, match=words):
        check_supported(changed(one, lowering=(), programs=written, barrier=False))


def test_a_kind_of_a_strategy_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "SHUFFLE", Kind(name="SHUFFLE", stream="compute", cost="compute"))
    one = plans.plan_of(plans.problem_of(), [[1]], microbatches=(1,), microbatch=8)
    written = (ProgramText((0,), "repeat(steps){ F0 SHUFFLE B0 OPT }"),)
    mine = changed(one, lowering=(), programs=written)
    with pytest.raises(UnsupportedPlanError, match=r"no handler .*; found SHUFFLE"):
        check_supported(mine)


def test_a_kind_of_a_strategy_runs_by_its_entry_point(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch", reason="the runtime needs PyTorch")
    from importlib.metadata import EntryPoint

    import real_runtime.executor
    import real_runtime.support
    from real_runtime.rank import make_executor
    from real_runtime.settings import RunSettings

    seen: list[tuple[int, str]] = []

    class Entry(EntryPoint):
        def load(self) -> Any:
            return lambda executor, node: seen.append((executor.step_number, node.op.name))

    for module in (real_runtime.executor, real_runtime.support):
        entry = Entry("SHUFFLE", "nowhere:at_all", real_runtime.support.HANDLERS)
        monkeypatch.setattr(module, "entry_points", lambda group, entry=entry: (entry,))
    monkeypatch.setitem(KINDS, "SHUFFLE", Kind(name="SHUFFLE", stream="compute", cost="compute"))
    one = plans.plan_of(plans.problem_of(), [[1]], microbatches=(1,), microbatch=8)
    text = (ProgramText((0,), "repeat(steps){ F0 SHUFFLE B0 OPT }"),)
    mine = changed(one, lowering=(), programs=text)
    check_supported(mine)
    tokens = str(plans.write_tokens(tmp_path))
    settings = RunSettings(plan="", data=tokens, out="", steps=2)
    executor = make_executor(mine, settings, 0, torch.device("cpu"))
    assert executor is not None
    losses = [executor.run_step(step).loss for step in range(2)]
    assert seen == [(0, "0SHUFFLE"), (1, "0SHUFFLE")] and losses[0] != losses[1]


def test_a_missing_pass_is_named() -> None:
    with pytest.raises(Exception, match="not installed; found fold_space"):
        check_supported(changed(plan(), lowering=(*plan().lowering, Call("fold_space"))))
