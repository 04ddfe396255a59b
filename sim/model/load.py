"""Model files -> Model: a Hugging Face ``config.json``, plain sizes, or measured times."""

from __future__ import annotations

import collections
import itertools
from pathlib import Path
from typing import Any

import msgspec

from sim.errors import InputError
from sim.model.graph import Block, Edge, MeasuredTime, Model, Saved
from sim.model.hf import is_hf_config, read_shape
from sim.model.sizes import is_sizes, model_from_sizes
from sim.model.transformer import build_model
from sim.spec.load import Source, read_source, validate
from sim.spec.measured import MeasuredBlockDoc, MeasuredDoc, MeasuredTimeDoc, expand_range

__all__ = ["load_model", "load_model_source"]


def load_model(
    model: str | Path | dict[str, Any], flash: bool = True, dropout: bool = False, name: str = ""
) -> Model:
    """Read a model.

    Args:
        model: path of a file, or its content. flash: attention scores never reach memory.
        dropout: masks are kept for the backward pass. name: for people; default: the config's own
            name, or the file's.

    Raises:
        InputError: the file is unreadable, of neither kind, or names an unknown family.
    """
    source = Source(model) if isinstance(model, dict) else read_source(model)
    return load_model_source(source, flash, dropout, name)


def load_model_source(
    source: Source, flash: bool = True, dropout: bool = False, name: str = ""
) -> Model:
    """Read a model from plain data; see ``load_model``."""
    if is_hf_config(source.data):
        shape, assumptions = read_shape(source, name or _name_of(source))
        return build_model(shape, flash, dropout, assumptions)
    if is_sizes(source.data):
        return model_from_sizes(source, flash, dropout, name)
    if "times" in source.data or "blocks" in source.data:
        return _measured(validate(MeasuredDoc, source), source)
    raise InputError(
        "neither a Hugging Face config nor a table of sizes or measured times",
        source.file,
        found=", ".join(list(source.data)[:6]),
        expected="model_type: ..., or mlp: with sizes, or blocks: and times:",
    )


def _name_of(source: Source) -> str:
    stated = source.data.get("_name_or_path") or source.data.get("name")
    if stated:
        return str(stated)
    path = Path(source.file)
    return path.parent.name or path.stem if path.stem == "config" else path.stem or "model"


def _measured(doc: MeasuredDoc, source: Source) -> Model:
    ranges = [_expand(row, i, "blocks", source) for i, row in enumerate(doc.blocks)]
    names = [name for r in ranges for name in r]
    if len(set(names)) != len(names):
        doubled = collections.Counter(names).most_common(1)[0][0]
        raise InputError("two blocks of one name", source.file, key="blocks", found=doubled)
    blocks: list[Block] = []
    layer, width = -1, doc.hidden
    num_layers = sum(len(r) for r in ranges if len(r) > 1)
    for row, expanded in zip(doc.blocks, ranges, strict=True):
        for name in expanded:
            # Single blocks before the first range are "before", later ones "after" the layers.
            layer += len(expanded) > 1
            label = layer if len(expanded) > 1 else (-1 if layer < 0 else num_layers)
            blocks.append(_block(row, name, label, width, doc.sequence_length))
            width = row.output or doc.hidden
    outputs = {n: row.output for row, r in zip(doc.blocks, ranges, strict=True) for n in r}
    edges = tuple(
        Edge(src=a.name, dst=b.name, elements=outputs[a.name] or doc.hidden)
        for a, b in itertools.pairwise(blocks)
    )
    return Model(
        name=doc.name,
        family="measured",
        blocks=tuple(blocks),
        edges=edges,
        num_layers=num_layers,
        hidden=doc.hidden,
        max_seq=doc.sequence_length,
        times=_times(doc, set(names), source),
        assumptions=(f"times are those measured at sequence length {doc.sequence_length}",),
    )


def _block(row: MeasuredBlockDoc, name: str, layer: int, width: int, sequence: int) -> Block:
    saved: tuple[Saved, ...] = ()
    if row.activation:
        per_token = row.activation / sequence
        saved = (Saved(elements=per_token, nbytes=1.0, split=row.activation_split),)
    return Block(
        name=name,
        kind=row.kind,
        layer=layer,
        params=row.params,
        saved=saved,
        input_elements=0 if row.kind == "embedding" else width,
        shares=row.shares,
    )


def _times(doc: MeasuredDoc, names: set[str], source: Source) -> tuple[MeasuredTime, ...]:
    rows: dict[tuple[str, str, int, int], MeasuredTime] = {}
    for i, row in enumerate(doc.times):
        for name in _expand(row, i, "times", source):
            key = (name, row.accelerator, row.tp, row.microbatch)
            if name not in names or key in rows:
                where = ("times", i, "blocks")
                raise InputError(
                    "times of an unknown block" if name not in names else "these times twice",
                    source.file,
                    source.line(where),
                    f"times.{i}.blocks",
                    name,
                    "a block of the list above" if name not in names else "one row each",
                )
            rows[key] = _time(row, name, doc.source)
    return tuple(rows.values())


def _time(row: MeasuredTimeDoc, name: str, source: str) -> MeasuredTime:
    time = MeasuredTime(
        block=name,
        accelerator=row.accelerator,
        tp=row.tp,
        microbatch=row.microbatch,
        forward=row.forward,
        input_grad=row.input_grad,
        weight_grad=row.weight_grad,
        update=row.update,
        source=row.source or source,
    )
    return time if row.recompute is None else msgspec.structs.replace(time, recompute=row.recompute)


def _expand(
    row: MeasuredBlockDoc | MeasuredTimeDoc, index: int, section: str, source: Source
) -> tuple[str, ...]:
    try:
        return expand_range(row.blocks)
    except InputError as error:
        where = source.line((section, index, "blocks"))
        key = f"{section}.{index}.blocks"
        raise InputError(
            error.message, source.file, where, key, error.found, error.expected
        ) from None
