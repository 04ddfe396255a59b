from __future__ import annotations

import json

import pytest

from sim.errors import InputError, UsageError
from sim.hardware.catalog import bundled_catalog
from sim.problem import load_problem, problem_from_documents

JOB = {"global_batch": 64, "sequence_length": 1024}


@pytest.mark.parametrize("cluster", bundled_catalog().names("clusters"))
def test_a_problem_survives_json_and_needs_no_catalogue(cluster, monkeypatch):
    problem = load_problem(cluster, "gpt2_355m", JOB)
    documents = json.loads(json.dumps(problem.documents))
    # Rebuilding must use the profiles in the documents: none may be looked up in a catalogue. The
    # guard against sparse peaks compares with the bundled profile, so it is left out here.
    monkeypatch.setattr("sim.hardware.catalog.Catalog._read", None)
    monkeypatch.setattr("sim.hardware.catalog.Catalog._refuse_sparse", lambda *_: None)
    assert problem_from_documents(documents) == problem


def test_overrides_reach_their_document_and_change_the_hash():
    plain = load_problem("v100_t4", "gpt2_355m", JOB)
    same = load_problem("v100_t4", "gpt2_355m", JOB)
    assert plain.hash == same.hash
    changes = ["job.global_batch=128", "cluster.accelerators.T4.memory=24 GB", "model.n_layer=12"]
    for override in changes:
        assert load_problem("v100_t4", "gpt2_355m", JOB, [override]).hash != plain.hash
    changed = load_problem("v100_t4", "gpt2_355m", JOB, changes)
    assert changed.job.global_batch == 128
    assert changed.machine.accelerators["T4"].memory_bytes == 24e9
    assert changed.model.num_layers == 12
    with pytest.raises(UsageError, match=r"expected cluster\.PATH="):
        load_problem("v100_t4", "gpt2_355m", JOB, ["global_batch=1"])


def test_profile_numbers_enter_the_hash():
    own = {
        "name": "c",
        "sites": [{"name": "s", "nodes": [{"accelerator": "mine", "chips": 1}]}],
        "profiles": {
            "accelerators": [
                {
                    "name": "mine",
                    "memory": "16 GB",
                    "memory_bandwidth": "1 TB/s",
                    "peaks": {"bf16": "100 TFLOP/s"},
                },
            ]
        },
    }
    problem = load_problem(own, "gpt2_355m", JOB)
    assert problem.machine.accelerators["mine"].peak_flops_per_s == {"bf16": 100e12}
    faster = load_problem(
        own, "gpt2_355m", JOB, ["cluster.profiles.accelerators.0.peaks.bf16=2 TFLOP/s"]
    )
    assert faster.hash != problem.hash


def test_job_decides_what_the_model_keeps():
    fused = load_problem("v100_t4", "gpt2_355m", JOB)
    plain = load_problem("v100_t4", "gpt2_355m", JOB | {"flash_attention": False})
    assert fused.model.blocks[1].attention.flash and not plain.model.blocks[1].attention.flash


def test_sequences_beyond_the_config_are_said():
    problem = load_problem("v100_t4", "gpt2_355m", JOB | {"sequence_length": 4096})
    assert any("exceed the 1024" in note for note in problem.assumptions)


def test_measured_times_belong_to_one_sequence_length():
    table = {
        "name": "m",
        "sequence_length": 512,
        "hidden": 8,
        "blocks": [{"blocks": "a"}],
        "times": [{"blocks": "a", "accelerator": "T4", "forward": "1 s", "input_grad": "1 s"}],
    }
    with pytest.raises(InputError, match="another sequence length"):
        load_problem("v100_t4", table, JOB)
    assert load_problem("v100_t4", table, JOB | {"sequence_length": 512}).model.times


@pytest.mark.parametrize(
    ("cluster", "overrides", "file", "key"),
    [
        ("no_such_cluster", [], "no_such_cluster", ""),
        (
            "v100_t4",
            ["cluster.sites.0.nodse=[]"],
            "--set cluster.sites.0.nodse=[]",
            "sites.0.nodse",
        ),
        ("v100_t4", ["job.global_batch=0"], "--set job.global_batch=0", "global_batch"),
        ("v100_t4", ["job.microbatch=7"], "job with --set job.microbatch=7", ""),
        ("v100_t4", ["model.n_head=7"], "gpt2_355m.json", "n_head"),
    ],
)
def test_errors_name_the_document(cluster, overrides, file, key):
    with pytest.raises(InputError) as error:
        load_problem(cluster, "gpt2_355m", JOB, overrides)
    assert error.value.file.endswith(file)
    assert error.value.key == key


def test_documents_of_a_plan_are_checked():
    documents = load_problem("v100_t4", "gpt2_355m", JOB).documents
    with pytest.raises(InputError, match="another format"):
        problem_from_documents(documents | {"format": 99})
    with pytest.raises(InputError, match="lacks a document"):
        problem_from_documents({"format": 1})


def test_one_number_of_a_node_profiles_nics_can_change():
    plain = load_problem("v100_t4", "gpt2_355m", JOB).machine.nodes[0]
    more = load_problem("v100_t4", "gpt2_355m", JOB, ["cluster.sites.0.nodes.0.nics.count=2"])
    assert more.machine.nodes[0].nics == 2 != plain.nics
    assert more.machine.nodes[0].nic_rate == plain.nic_rate
    assert problem_from_documents(more.documents).machine == more.machine


def test_too_long_sequences_are_an_assumption():
    problem = load_problem("v100_t4", "gpt2_355m", JOB | {"sequence_length": 2048})
    note = "sequences of 2048 exceed the 1024 of the model's config"
    assert note in problem.assumptions
    assert note in problem_from_documents(problem.documents).assumptions


def test_a_length_without_times_is_blamed_on_the_jobs_line(tmp_path):
    (tmp_path / "m.yaml").write_text(
        "name: m\nsequence_length: 1024\nhidden: 8\nblocks: [{blocks: a}]\n"
        "times: [{blocks: a, accelerator: T4, forward: 1 s, input_grad: 1 s}]\n"
    )
    (tmp_path / "job.yaml").write_text("global_batch: 8\nsequence_length: 512\n")
    with pytest.raises(InputError, match="belong to another sequence length") as error:
        load_problem("v100_t4", tmp_path / "m.yaml", tmp_path / "job.yaml")
    assert error.value.file.endswith("job.yaml")
    assert (error.value.line, error.value.key) == (2, "sequence_length")
