"""Training data: token files by memory map, and which sequences each step and replica sees.

Imports no torch: files are checked before any rank starts.

The order of sequences depends on the seed alone. A plan only says which replica takes which part of
a step's global batch, so every plan sees the same batch.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError

__all__ = ["Batches", "TokenFile", "open_tokens"]


class TokenFile:
    """Tokens of a file, not read until asked for.

    Attributes:
        tokens: (n,), a memory map. path: for messages. what: how the file was read, in words.
    """

    def __init__(self, tokens: NDArray[np.integer], path: str, what: str) -> None:
        self.tokens, self.path, self.what = tokens, path, what


def open_tokens(path: str | Path) -> TokenFile:
    """Open a token file by its ending.

    ``.npy`` holds integers as numpy saves them, ``.bin`` little-endian uint16 without a head, and
    every other file is read as bytes: one token of 0 to 255 each.

    Raises:
        InputError: the file is missing, empty, or its array is not one row of integers.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError("no such data file", str(path), expected="a text or token file")
    if path.stat().st_size == 0:
        raise InputError("the data file is empty", str(path))
    try:
        if path.suffix == ".npy":
            tokens, what = np.load(path, mmap_mode="r", allow_pickle=False), "token ids"
        elif path.suffix == ".bin":
            tokens, what = np.memmap(path, "<u2", "r"), "16-bit token ids"
        else:
            tokens, what = np.memmap(path, np.uint8, "r"), "bytes"
    except (ValueError, OSError) as error:
        raise InputError("not a token file", str(path), found=str(error)) from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "ui":
        found = f"{tokens.ndim} dimensions of {tokens.dtype}"
        raise InputError("not a token file", str(path), found=found, expected="a row of integers")
    return TokenFile(tokens, str(path), what)


class Batches:
    """The sequences of every step.

    Args:
        file: tokens. vocab: rows of the embedding. sequence_length: [tokens].
        global_batch: [sequences] per step. seed: of the order.

    Raises:
        InputError: the file holds no whole sequence, or bytes do not fit the vocabulary.
    """

    def __init__(
        self, file: TokenFile, vocab: int, sequence_length: int, global_batch: int, seed: int
    ) -> None:
        self.file, self.vocab, self.length = file, vocab, sequence_length
        self.global_batch, self.seed = global_batch, seed
        self.count = (len(file.tokens) - 1) // sequence_length
        if self.count < 1:
            raise InputError(
                "the data file is shorter than one sequence",
                file.path,
                found=f"{len(file.tokens)} tokens",
                expected=f"at least {sequence_length + 1}",
            )
        if file.what == "bytes" and vocab < 256:
            raise InputError(
                "bytes do not fit the vocabulary",
                file.path,
                found=f"{vocab} rows",
                expected="a vocabulary of at least 256, or a file of token ids",
            )
        self._epoch = -1
        self._order: NDArray[np.int64] = np.zeros(0, np.int64)

    def sequence(self, number: int) -> NDArray[np.int64]:
        """Return the tokens of the number-th sequence of the run, and the one behind it.

        Raises:
            InputError: a token id lies outside the vocabulary.
        """
        epoch, at = divmod(number, self.count)
        if epoch != self._epoch:
            self._order = np.random.default_rng((self.seed, epoch)).permutation(self.count)
            self._epoch = epoch
        first = int(self._order[at]) * self.length
        tokens = self.file.tokens[first : first + self.length + 1]
        if tokens.max() >= self.vocab or tokens.min() < 0:
            where = int(np.argmax((tokens >= self.vocab) | (tokens < 0)))
            raise InputError(
                f"token {first + where} is outside the vocabulary",
                self.file.path,
                found=str(tokens[where]),
                expected=f"0 to {self.vocab - 1}",
            )
        return tokens.astype(np.int64)

    def microbatch(
        self, step: int, first: int, size: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return inputs and targets of some sequences of a step's global batch, each (S, b).

        Args:
            step: from 0. first: of the sequences in the global batch. size: how many.
        """
        at = step * self.global_batch + first
        rows = np.stack([self.sequence(at + i) for i in range(size)], 1)
        return rows[:-1].copy(), rows[1:].copy()
