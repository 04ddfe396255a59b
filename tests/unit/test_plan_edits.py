"""Plans that somebody edited: refused by name, before anything is priced."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest

from sim.cost.ledger import peak_memory
from sim.errors import InputError, PlanError
from sim.plan.draft import CellKnobs, DataKnobs, OffloadKnobs, PipelineKnobs, PlanDraft
from sim.plan.generators import generator
from sim.plan.io import plan_from_json, plan_to_json
from sim.plan.lower import lower
from sim.plan.passes import expand
from sim.plan.plan import Call, Plan, ProgramText, Table
from sim.plan.program import format_program
from sim.plan.tables import resolve_tables
from sim.plan.validate import validate
from strategies.compose import compose
from strategies.offload.autohete import AutoHeteKnobs, layer_segments
from tests.unit.offload_cases import gpt
from tests.unit.test_nvme import on_drives
from tests.unit.test_offload import plan_of

Document = dict[str, Any]
Edit = Callable[[Document], object]


@cache
def document(kind: str = "host") -> bytes:
    """A plan with every kind of segment, late amounts and amounts of its own."""
    if kind == "host":
        knobs: Document = {"optimizer": 2, "parameters": 1, "clipping": "speculate"}
        return plan_to_json(plan_of(on_drives(1, 1), nvme=1, **knobs))
    problem, draft = gpt(80.0, 2, 2)
    return plan_to_json(
        lower(problem, compose(problem, [("zero", {"stage": int(kind)})], start=draft))
    )


def edited(edit: Edit, kind: str = "host") -> Plan:
    found = json.loads(document(kind))
    edit(found)
    return plan_from_json(json.dumps(found).encode())


def setting(*path: Any, to: Any) -> Edit:
    def edit(found: Document) -> None:
        at: Any = found
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = to

    return edit


def call(name: str) -> int:
    names = [c["name"] for c in json.loads(document())["lowering"]]
    return names.index(name)


def segment(name: str) -> int:
    return [s["name"] for s in json.loads(document())["placement"]["segments"]].index(name)


def refused(plan: Plan, message: str, key: str = "") -> None:
    with pytest.raises(PlanError, match=message) as error:
        validate(plan)
    assert error.value.expected or error.value.found
    assert key in error.value.key


def test_the_plans_as_written_are_well_formed() -> None:
    for kind in ("host", "0", "1", "2", "3"):
        validate(edited(lambda _: None, kind))


# -- sizes and numbers


@pytest.mark.parametrize("ring", ["parameter_buffers", "gradient_buffers", "nvme_buffers"])
@pytest.mark.parametrize("size", [0, -1, -5])
def test_a_ring_has_at_least_one_buffer(ring: str, size: int) -> None:
    refused(edited(setting("placement", ring, to=size)), "must be positive", ring)


@pytest.mark.parametrize("field", ["flops", "nbytes", "tokens"])
@pytest.mark.parametrize("value", [-1.0, 1e300])
def test_amounts_are_finite_and_not_negative(field: str, value: float) -> None:
    plan = edited(setting("amounts", "0F", field, to=value))
    refused(plan, "finite number and not negative", f"amounts.0F.{field}")
    broken = msgspec.structs.replace(plan.amounts["0F"], **{field: float("nan")})
    refused(msgspec.structs.replace(plan, amounts=plan.amounts | {"0F": broken}), "finite")


@pytest.mark.parametrize(
    "values",
    [
        ["a"],
        [-1.0],
        [1e300],
        [None],
        [True],
        ["1"],
        [[1.0, -1.0]],
        [[[1, 2]]],
        [[1, [2]]],
        [{}],
        [[]],
    ],
)
@pytest.mark.parametrize("key", ["rollback", "forward"])
def test_late_amounts_are_numbers(key: str, values: list[Any]) -> None:
    plan = edited(setting("tables", "speculation", "values", key, to=values))
    refused(plan, "a late amount is", f"tables.speculation.{key}")
    first = edited(setting("tables", "speculation", "initial", to={key: values[0]}))
    refused(first, "a late amount is", f"tables.speculation.{key}")


@generator("below-zero")
def below_zero(_: np.random.Generator) -> Iterator[Document]:
    while True:
        yield {"x": np.array([1.0, -1.0])}


def test_values_of_generators_and_controllers_are_checked_as_well() -> None:
    made = {"t": Table(origin="generator", generator="below-zero")}
    with pytest.raises(PlanError, match="a late amount is") as error:
        resolve_tables(made, 2)
    assert error.value.key == "tables.t.x"
    wide = {"keys": ["x"], "sigma": 1e200}
    with pytest.raises(PlanError, match="refuses its parameters"):
        resolve_tables({"t": Table(origin="generator", generator="lognormal", parameters=wide)}, 2)


# -- arguments of passes


@pytest.mark.parametrize("name", ["priority", "whole_steps"])
@pytest.mark.parametrize("value", ["no", "yes", 0, 1, None, [], {}])
def test_switches_of_a_pass_are_true_or_false(name: str, value: Any) -> None:
    at = call("segments")
    plan = edited(setting("lowering", at, "args", name, to=value))
    refused(plan, "wrong type", f"lowering.segments.{name}")


@pytest.mark.parametrize("name", ["schedule", "transfers", "gradients", "segments", "nvme"])
def test_arguments_that_a_pass_does_not_take(name: str) -> None:
    plan = edited(setting("lowering", call(name), "args", "prioritty", to=1))
    refused(plan, "there is no prioritty", f"lowering.{name}.prioritty")
    for version in (0, 2):
        plan = edited(setting("lowering", call(name), "version", to=version))
        refused(plan, "version", "lowering")


@pytest.mark.parametrize(
    ("name", "argument", "value"),
    [
        ("schedule", "chunks", 0),
        ("schedule", "chunks", True),
        ("schedule", "order", "F0"),
        ("gradients", "tied", [0.5]),
        ("segments", "clipping", "foo"),
        ("nvme", "whole_steps", "no"),
    ],
)
def test_arguments_have_their_types(name: str, argument: str, value: Any) -> None:
    plan = edited(setting("lowering", call(name), "args", argument, to=value))
    with pytest.raises(PlanError, match=r"wrong type|unknown clipping") as error:
        validate(plan)
    assert error.value.key.startswith(f"lowering.{name}.{argument}") and error.value.expected
    with pytest.raises(PlanError):
        expand(plan)


@pytest.mark.parametrize(
    "wanting", [Call("delayed", 1, {"tau": 1}), Call("local_steps", 1, {"inner": 1})]
)
def test_arguments_that_a_pass_needs(wanting: Call) -> None:
    plan = edited(lambda _: None, "0")
    refused(msgspec.structs.replace(plan, lowering=(*plan.lowering, wanting)), "missing required")


# -- segments


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("cell", 1, "outside the grid"),
        ("name", "l1", "name of its own"),
        ("name", "l 0", "name of its own"),
        ("name", "l]", "name of its own"),
        ("offload", ["optimizer", "optimizer"], "twice on the host"),
        ("offload", ["nvme"], "its optimizer is not on the host"),
        ("offload", ["parameters", "nvme"], "its optimizer is not on the host"),
    ],
)
def test_segments_that_say_what_cannot_be(path: str, value: Any, message: str) -> None:
    plan = edited(setting("placement", "segments", segment("l0"), path, to=value))
    refused(plan, message, "placement.segments")


def test_a_segment_sits_with_its_stage() -> None:
    plan = plan_of(on_drives(2, 1), stages=2, optimizer=1)
    moved = (msgspec.structs.replace(plan.placement.segments[0], cell=1),)
    placement = msgspec.structs.replace(
        plan.placement, segments=(*moved, *plan.placement.segments[1:])
    )
    refused(msgspec.structs.replace(plan, placement=placement), "another cell than its stage")


def test_a_segment_recomputes_as_its_cell_or_nothing() -> None:
    at = segment("l1")
    edit = setting("placement", "segments", at, "recompute", to="selective")
    with pytest.raises(PlanError, match="segments that recompute otherwise than their cells"):
        validate(edited(edit))


def test_segments_come_in_order() -> None:
    plan = edited(lambda found: found["placement"]["segments"].reverse())
    refused(plan, "in the order of their blocks")


# -- what lives on the host is moved


@pytest.mark.parametrize("names", [("nvme",), ("segments", "nvme")])
def test_a_pass_that_was_dropped(names: tuple[str, ...]) -> None:
    plan = edited(lambda _: None)
    left = tuple(c for c in plan.lowering if c.name not in names)
    refused(msgspec.structs.replace(plan, lowering=left), "and no op does that")


@pytest.mark.parametrize("name", ["segments", "nvme", "gradients"])
def test_a_pass_that_was_moved_first_or_called_twice(name: str) -> None:
    at = call(name)
    first = edited(lambda found: found["lowering"].insert(0, found["lowering"].pop(at)))
    with pytest.raises(PlanError):
        validate(first)
    twice = edited(lambda found: found["lowering"].append(found["lowering"][at]))
    refused(twice, "undo what stands before", "lowering")


def test_a_draft_with_segments_on_the_host_and_no_pass() -> None:
    problem, draft = gpt(80.0)
    segments = layer_segments(problem, draft, AutoHeteKnobs(optimizer=3))
    bare = msgspec.structs.replace(draft, offload=OffloadKnobs(segments=segments))
    refused(lower(problem, bare), "optimizer on the host, and no op does that")


@pytest.mark.parametrize("offload", [["optimizer"], ["parameters"], ["optimizer", "nvme"]])
def test_a_whole_stage_on_the_host_without_a_pass(offload: list[str]) -> None:
    plan = edited(setting("placement", "segments", 0, "offload", to=offload), "0")
    refused(plan, "stage 0 has its .* on the host, and no op does that")


def written(kind: str, edit: Callable[[str], str]) -> Plan:
    """The plan with its programs written out, one op a line, and edited."""
    plan = edited(lambda _: None, kind)
    texts = tuple(
        ProgramText(p.ranks, edit(format_program(p).replace(" ; ", " ;\n"))) for p in expand(plan)
    )
    return msgspec.structs.replace(plan, lowering=(), programs=texts)


@pytest.mark.parametrize("kind", ["host", "1", "2", "3"])
def test_a_program_written_out_is_proved_alike(kind: str) -> None:
    validate(written(kind, lambda text: text))


@pytest.mark.parametrize(
    ("kind", "old", "new", "message"),
    [
        ("host", "stream=host", "stream=compute", "OPT on the stream host"),
        ("host", "0D2H[l3]", "0HOST[l3]", "behind a D2H of the gradient"),
        ("host", "0H2D[l3]", "0HOST[l3]", "an H2D behind OPT"),
        ("host", "0FETCH_F0[l0]", "0H2D0[l0]", "a fetch for 0F0"),
        ("host", "0NVME_READ[l3]", "0HOST[read]", "a read from NVMe"),
        ("host", "0NVME_WRITE[l3]", "0HOST[write]", "a write to NVMe"),
        ("1", "0UNSHARD", "0ALL_GATHER", "UNSHARD of the updated parameters"),
        ("3", "0UNSHARD_B1[l1]", "0ALL_GATHER1[l1]", "a gather for 0B1"),
    ],
)
def test_an_op_that_was_lost(kind: str, old: str, new: str, message: str) -> None:
    plan = written(kind, lambda text: text.replace(old, new))
    with pytest.raises(PlanError) as error:
        validate(plan)
    assert message in error.value.expected and "no op does that" in error.value.message


# -- drafts


@pytest.mark.parametrize(
    ("part", "knobs", "key"),
    [
        ("offload", OffloadKnobs(parameter_buffers=-2), "offload.parameter_buffers"),
        ("offload", OffloadKnobs(gradient_buffers=0), "offload.gradient_buffers"),
        ("data", DataKnobs(microbatches=(2, 2), buffers=-1), "data.buffers"),
        ("data", DataKnobs(microbatches=(2, 2), zero=9), "data.zero"),
        ("data", DataKnobs(microbatches=(4, 0)), "data.microbatches[1]"),
        ("data", DataKnobs(microbatches=(2, 2), zero=1.0), "data.zero"),  # type: ignore[arg-type]
        ("pipeline", PipelineKnobs(microbatch=0), "pipeline.microbatch"),
        ("pipeline", PipelineKnobs(chunks=0), "pipeline.chunks"),
        ("pipeline", PipelineKnobs(buffers=-1), "pipeline.buffers"),
        ("pipeline", PipelineKnobs(buffers="two"), "pipeline.buffers"),  # type: ignore[arg-type]
        ("cells", (CellKnobs(stage=0, replica=0, chips=(0,), tp=1.0),), "cells[0].tp"),  # type: ignore[arg-type]
    ],
)
@pytest.mark.parametrize("zero", [0, 3])
def test_knobs_outside_their_ranges(part: str, knobs: Any, key: str, zero: int) -> None:
    problem, draft = gpt(80.0, 2, 2)
    if zero:
        draft = msgspec.structs.replace(draft, data=DataKnobs(microbatches=(2, 2), zero=zero))
    with pytest.raises(InputError) as error:
        lower(problem, msgspec.structs.replace(draft, **{part: knobs}))
    assert error.value.key == key and error.value.found and error.value.expected


def test_memory_terms_of_rings_are_never_negative() -> None:
    problem, draft = gpt(80.0, 2, 2)
    data = DataKnobs(microbatches=(2, 2), zero=3, buffers=1)
    plan = lower(problem, msgspec.structs.replace(draft, data=data))
    assert all(min(x.terms.values()) >= 0 for x in peak_memory(plan, problem).values())


def test_a_draft_without_cells() -> None:
    problem, _ = gpt(80.0)
    with pytest.raises(InputError, match="no cells"):
        lower(problem, PlanDraft())
