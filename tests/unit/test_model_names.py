"""Models by name, and an encoder with a decoder through plan and simulation."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.checks import check_file
from sim.engine.simulate import simulate
from sim.errors import InputError
from sim.model.count import total_params
from sim.model.sizes import published_names
from sim.plan.flat import flatten
from sim.plan.lower import lower
from sim.plan.passes import expand
from sim.plan.uniform import uniform
from sim.problem import load_problem, problem_from_documents

CONFIGS = Path(__file__).parents[1] / "data" / "hf_configs"
JOB = {"name": "j", "global_batch": 32, "sequence_length": 128, "dtype": "bf16"}


def test_a_published_model_is_loaded_by_its_name() -> None:
    problem = load_problem("a100x64", "Llama-2-70B", JOB)
    assert problem.model.name == "Llama-2-70B"
    assert total_params(problem.model, norms=False) == 68975329280
    again = problem_from_documents(problem.documents)
    assert again.model == problem.model


def test_an_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(InputError, match="neither a file nor a bundled model") as error:
        load_problem("a100x64", "Llama-9", JOB)
    assert "Llama-2-70B" in error.value.expected and "llama2_7b" in error.value.expected
    assert "Grok-1-314B" in published_names()


def test_sizes_in_a_file_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "sizes.yaml"
    file.write_text(
        "name: mine\nmlp: swiglu\nnum_hidden_layers: 2\nhidden_size: 64\n"
        "num_attention_heads: 4\nintermediate_size: 128\nvocab_size: 100\n"
    )
    found = check_file(file)
    assert (found.kind, found.error) == ("model", "")
    file.write_text(file.read_text() + "params_computed: 7\n")
    assert "not what the sizes give" in check_file(file).error


@pytest.mark.parametrize(("pp", "chunks"), [(1, 1), (2, 1), (2, 4), (4, 1)])
def test_an_encoder_and_its_decoder_plan_and_run(pp: int, chunks: int) -> None:
    """Three blocks share one embedding: each position adds up its gradient once."""
    problem = load_problem("a100x64", str(CONFIGS / "t5_efficient_base.json"), JOB)
    schedule = "interleaved" if chunks > 1 else "1f1b"
    draft = uniform(problem.model, 32, range(8), pp=pp, chunks=chunks, schedule=schedule)
    plan = lower(problem, draft)
    carried = {b.elements for b in plan.placement.boundaries}
    assert carried <= {768, 1536} and (pp * chunks < 4 or carried == {768, 1536})
    for program in expand(plan):
        ops = flatten(program).ops
        sums = [op for op in ops if op.label == "embed"]
        holders = {op.stage for op in ops} & set(shared_stages(plan, problem))
        assert len(sums) == bool(holders and pp > 1)
    run = simulate(plan, problem)
    updates = [op for op in run.layout.graph.ops if op.kind == "OPT"]
    assert {op.stage for op in updates} == set(range(pp * chunks))


def shared_stages(plan, problem) -> list[int]:
    return [
        s.stage
        for s in plan.placement.stages
        if any(b.shares for b in problem.model.blocks[s.blocks[0] : s.blocks[1]])
    ]
