from __future__ import annotations

import pytest

from sim.errors import InputError
from sim.model.count import total_params
from sim.model.load import load_model_source
from sim.spec.load import parse_text
from sim.spec.measured import expand_range

TABLE = """\
name: small
sequence_length: 1024
hidden: 256
times_in: ms
source: a test bench
blocks:
  - {blocks: embed, kind: embedding, params: 1M, shares: wte}
  - {blocks: layers.0-2, params: 800k, activation: 2 MiB}
  - {blocks: head, kind: head, params: 1M, output: 1000, shares: wte}
times:
  - {blocks: embed, accelerator: chip, forward: 0.1, input_grad: 0.2}
  - {blocks: layers.0-2, accelerator: chip, forward: 1.5, input_grad: 1,
     weight_grad: 1, update: 0.3}
  - {blocks: head, accelerator: chip, forward: 40 us, input_grad: 2, recompute: 0, source: other}
"""


def load(text: str):
    return load_model_source(parse_text(text, "m.yaml"))


def test_a_table_becomes_a_chain_of_blocks():
    model = load(TABLE)
    assert [b.name for b in model.blocks] == ["embed", "layers.0", "layers.1", "layers.2", "head"]
    assert [b.layer for b in model.blocks] == [-1, 0, 1, 2, 3]
    assert (model.family, model.num_layers, model.max_seq) == ("measured", 3, 1024)
    assert total_params(model) == 1_000_000 + 3 * 800_000
    assert [b.input_elements for b in model.blocks] == [0, 256, 256, 256, 256]
    assert [(e.src, e.dst, e.elements) for e in model.edges][-1] == ("layers.2", "head", 256)
    kept = model.blocks[1].saved[0]
    assert kept.elements * kept.nbytes * 1024 == 2 * 2**20


def test_times_are_seconds_whatever_they_were_written_in():
    times = {t.block: t for t in load(TABLE).times}
    assert times["layers.1"].forward == 1.5e-3
    assert times["layers.1"].update == pytest.approx(0.3e-3)
    assert (times["layers.1"].recompute, times["layers.1"].source) == (-1.0, "a test bench")
    assert times["head"].forward == 40e-6
    assert (times["head"].recompute, times["head"].source) == (0.0, "other")


@pytest.mark.parametrize(
    ("old", "new", "line", "text"),
    [
        ("times_in: ms\n", "", 10, "without its unit"),
        ("- {blocks: embed, acc", "- {blocks: embde, acc", 11, "times of an unknown block"),
        ("- {blocks: head, acc", "- {blocks: embed, acc", 14, "these times twice"),
        ("blocks: head, kind", "blocks: embed, kind", 0, "two blocks of one name"),
        ("layers.0-2, params", "layers.2-0, params", 8, "an empty or huge range"),
        ("layers.0-2, params", "layers.0-999999999, params", 8, "an empty or huge range"),
        ("input_grad: 0.2", "backward: 0.2", 11, "unknown key backward"),
    ],
)
def test_wrong_tables(old, new, line, text):
    with pytest.raises(InputError) as error:
        load(TABLE.replace(old, new, 1))
    assert text in error.value.message
    assert (error.value.file, error.value.line) == ("m.yaml", line)


def test_ranges():
    assert expand_range("layers.9-11") == ("layers.9", "layers.10", "layers.11")
    assert expand_range("gpt-2") == ("gpt-2",)


def test_a_file_of_neither_kind_is_refused():
    with pytest.raises(InputError, match="neither a Hugging Face config nor a table"):
        load("name: x\n")
