"""Token files, and that every plan sees the same global batch."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from real_runtime.data import Batches, open_tokens
from real_runtime.settings import Recipe, learning_rate
from sim.errors import InputError


def batches(path: Path, length: int = 4, batch: int = 6, vocab: int = 256) -> Batches:
    return Batches(open_tokens(path), vocab, length, batch, seed=5)


def test_every_split_of_a_batch_is_the_same_batch(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes(bytes(range(200)))
    source = batches(file)
    for step in (0, 3, 20):
        whole, after = source.microbatch(step, 0, 6)
        parts = [source.microbatch(step, first, size) for first, size in ((0, 1), (1, 3), (4, 2))]
        assert (np.concatenate([x for x, _ in parts], 1) == whole).all()
        assert (np.concatenate([y for _, y in parts], 1) == after).all()
        assert (after == whole + 1).all()  # each byte's successor is the next number
        assert whole.shape == (4, 6)


def test_an_epoch_visits_every_sequence_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes(bytes(range(121)))  # 30 sequences of 4, 5 steps of 6
    source = batches(file)
    epochs = [
        np.concatenate([source.microbatch(s, 0, 6)[0][0] for s in range(5 * e, 5 * e + 5)])
        for e in (0, 1)
    ]
    assert [sorted(e.tolist()) for e in epochs] == [list(range(0, 120, 4))] * 2
    assert (epochs[0] != epochs[1]).any() and (epochs[0] != np.sort(epochs[0])).any()
    again = batches(file)
    assert (again.microbatch(7, 0, 6)[0] == source.microbatch(7, 0, 6)[0]).all()


def test_an_id_beyond_int64_is_named_as_it_is(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.full(300, 2**63 + 5, np.uint64))
    with pytest.raises(InputError, match=f"found {2**63 + 5}; expected 0"):
        batches(tmp_path / "a.npy").microbatch(0, 0, 1)


def test_forms_of_a_token_file(tmp_path: Path) -> None:
    tokens = np.arange(300, dtype="<u2")
    np.save(tmp_path / "a.npy", tokens)
    tokens.tofile(tmp_path / "a.bin")
    for name in ("a.npy", "a.bin"):
        assert (open_tokens(tmp_path / name).tokens == tokens).all()
    with pytest.raises(
        InputError, match="token 256 is outside the vocabulary; found 256; expected 0"
    ):
        Batches(open_tokens(tmp_path / "a.bin"), 256, 299, 1, 0).sequence(0)


def test_wrong_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "bad.npy").write_text("no array")
    np.save(tmp_path / "square.npy", np.zeros((2, 2), np.int32))
    (tmp_path / "four.txt").write_text("four")
    for name, words in (
        ("none.txt", "no such data file"),
        ("empty.txt", "empty"),
        ("bad.npy", "not a token file"),
        ("square.npy", "2 dimensions of int32"),
        ("four.txt", "shorter than one sequence; found 4 tokens; expected at least 5"),
    ):
        with pytest.raises(InputError, match=words):
            batches(tmp_path / name)
    (tmp_path / "text.txt").write_text("bytes need rows")
    with pytest.raises(InputError, match="bytes do not fit the vocabulary; found 100 rows"):
        batches(tmp_path / "text.txt", vocab=100)


def test_learning_rate_warms_up_and_follows_a_cosine() -> None:
    recipe = Recipe(learning_rate=2.0, warmup=4, final_share=0.25)
    rates = [learning_rate(recipe, step, 24) for step in range(25)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    for step in range(4, 25):
        share = 0.25 + 0.75 * math.cos(math.pi * (step - 4) / 40) ** 2
        assert rates[step] == pytest.approx(2.0 * share)
