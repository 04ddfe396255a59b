"""Programs: what one class of ranks does, as nested blocks of ops.

Text form::

    once { OP OP }   repeat(3) { ... }   repeat(steps) { ... }   on(PUSH) { ... }

``repeat(steps)`` runs as many steps as the run asks for; ops outside any block stand in an implicit
``repeat(steps)``. Items are separated by white space, ``;`` or ``|``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from sim.errors import PlanError
from sim.plan.op import MAX_DIGITS, Op, format_op, parse_op

__all__ = ["STEPS", "Block", "Program", "format_program", "forwards", "parse_program", "walk"]

STEPS = 0
"""Repeat count that stands for "as many steps as the run asks for"."""


MAX_DEPTH = 16
"""Deepest nesting of blocks."""


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence of ops and nested blocks.

    Args:
        form: "once", "repeat" or "on".
        items: ops and blocks in list order.
        count: repetitions (repeat only); STEPS for the run's number of steps.
        message: kind that triggers an instance (on only).
    """

    form: str
    items: tuple[Op | Block, ...]
    count: int = 1
    message: str = ""


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """What every rank of ``ranks`` runs.

    Args:
        ranks: members of the class; peers and groups of an op are resolved per rank.
        blocks: in order.
    """

    ranks: tuple[int, ...]
    blocks: tuple[Block, ...]


_SPACE = re.compile(r"[\s;|]*")
_OPEN = re.compile(r"(once|repeat|on)\s*(?:\(\s*(\w+)\s*\))?\s*\{")


def parse_program(text: str, ranks: tuple[int, ...]) -> Program:
    """Read a program.

    Args:
        text: see the module's text form.
        ranks: the ranks that run it.

    Raises:
        PlanError: the text is malformed.
    """
    blocks: list[Block] = []
    loose: list[Op | Block] = []
    pos = _skip(text, 0)
    while pos < len(text):
        if _OPEN.match(text, pos):
            if loose:
                blocks.append(Block(form="repeat", items=tuple(loose), count=STEPS))
                loose = []
            block, pos = _parse_block(text, pos)
            blocks.append(block)
        else:
            op, pos = parse_op(text, pos)
            loose.append(op)
        pos = _skip(text, pos)
    if loose:
        blocks.append(Block(form="repeat", items=tuple(loose), count=STEPS))
    return Program(ranks=ranks, blocks=tuple(blocks))


def _skip(text: str, pos: int) -> int:
    match = _SPACE.match(text, pos)
    return match.end() if match else pos


def _parse_block(text: str, pos: int, depth: int = 0) -> tuple[Block, int]:
    match = _OPEN.match(text, pos)
    if match is None:
        raise PlanError(
            "not a block", found=repr(text[pos : pos + 30]), expected="once{, repeat(n){, on(KIND){"
        )
    form, argument = match.group(1), match.group(2)
    if depth > MAX_DEPTH:
        raise PlanError(
            "blocks are nested too deeply", found=str(depth), expected=f"at most {MAX_DEPTH}"
        )
    items: list[Op | Block] = []
    pos = _skip(text, match.end())
    while pos < len(text) and text[pos] != "}":
        item: Op | Block
        item, pos = (
            _parse_block(text, pos, depth + 1) if _OPEN.match(text, pos) else parse_op(text, pos)
        )
        items.append(item)
        pos = _skip(text, pos)
    if pos >= len(text):
        raise PlanError(f"block {form} is not closed", found="end of text", expected="}")
    count, message = 1, ""
    if form == "repeat":
        if argument is None or not (argument == "steps" or argument.isdigit()):
            raise PlanError(
                "repeat needs a count", found=str(argument), expected="repeat(3) or repeat(steps)"
            )
        if len(argument) > MAX_DIGITS:
            raise PlanError(
                "repeat count is too large", found=argument[:40], expected=f"{MAX_DIGITS} digits"
            )
        count = STEPS if argument == "steps" else int(argument)
        if argument != "steps" and count < 1:
            raise PlanError("repeat needs a positive count", found=argument, expected="at least 1")
    elif form == "on":
        if argument is None:
            raise PlanError("on needs the kind of message", expected="on(PUSH){...}")
        message = argument
    return Block(form=form, items=tuple(items), count=count, message=message), pos + 1


def format_program(program: Program) -> str:
    """Write a program so that ``parse_program`` reads the same one back."""
    return " ".join(_format_block(b) for b in program.blocks)


def _format_block(block: Block) -> str:
    head = {
        "once": "once",
        "repeat": f"repeat({'steps' if block.count == STEPS else block.count})",
        "on": f"on({block.message})",
    }[block.form]
    body = " ; ".join(format_op(i) if isinstance(i, Op) else _format_block(i) for i in block.items)
    return f"{head}{{ {body} }}"


def forwards(program: Program) -> int:
    """How often a step runs its forwards: 1, or the turns of the repeats around them."""

    def inner(items: tuple[Op | Block, ...], times: int) -> int:
        found = 0
        for item in items:
            if isinstance(item, Block):
                found = max(found, inner(item.items, times * (item.count or 1)))
            elif item.kind == "F":
                found = max(found, times)
        return found

    return max(1, inner(program.blocks, 1))


def walk(program: Program) -> Iterator[Op]:
    """Every op of a program, once, in list order."""

    def inner(items: tuple[Op | Block, ...]) -> Iterator[Op]:
        for item in items:
            if isinstance(item, Op):
                yield item
            else:
                yield from inner(item.items)

    yield from inner(program.blocks)
