"""The pass ``lend`` at work: a variant's list with its layers of experts written out."""

from __future__ import annotations

from collections import defaultdict
from typing import Annotated

import msgspec

from sim.plan.arguments import Arguments
from sim.plan.deps import experts_label, of_experts, segment_of
from sim.plan.kinds import KINDS
from sim.plan.op import Dep, Op, Ref
from sim.plan.variant import Variant
from strategies.lowering.lend_layers import FORWARD, PASSES, Key, Layers, in_order

__all__ = ["CHANNEL", "SEARCH", "LendArguments", "Writer"]

CHANNEL = 1
"""Exchanges of experts have a stream of their own: gradient sums over the same ranks pass them."""
SEARCH = "search"
"""Amount of the HOST op that looks for a layer's next lending."""
SEARCHED = "searched"
HALVES = ("", ".1")
"""Behind the label of an exchange, and behind its key: on its way tokens may change devices."""
_WAYS = {"dispatch": "dispatch", "combine": "combine", "combine_b": "dispatch"}
_WAYS |= {"dispatch_b": "combine", "dispatch_r": "dispatch", "combine_r": "combine"}
"""Which of a table's two matrices an exchange has: gradients of what is combined travel the way
that tokens are dispatched."""


class LendArguments(Arguments, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of the pass ``lend``.

    Args:
        experts: segments with routed experts, as "stage[name]" -> what their keys in the tables
            begin with.
        table: of late amounts, "" for even ones: KEY.load, .load_b, .dispatch, .combine and, where
            experts are lent, .move and .reduce, with .0 and .1 behind for their parts.
        relayed: exchanges have two halves, with .1 behind for the second.
        slots: experts that each device may be lent per layer; 0 lists no transfers.
        overlap: scheduled, else blocking.
        eager: scheduled, the first layer of a stage does not wait either: its parameters leave as
            soon as they are updated, its gradients as soon as they are there.
        search: table whose key "searched" says whether a step searches; "" lists no search. Its
            work is the plan's amount "search".
        fresh: the transfers wait for the search of their own step, else for that of the one before.
    """

    experts: dict[str, str] = {}
    table: str = ""
    relayed: bool = False
    slots: Annotated[int, msgspec.Meta(ge=0)] = 0
    overlap: bool = True
    eager: bool = False
    search: str = ""
    fresh: bool = False


class Writer:
    """One variant on its way through the pass.

    Attributes:
        variant, layers, given: see there. ops: the list so far.
        moves: transfers that bring a layer what it is lent. back: those that bring its gradients.
    """

    def __init__(self, variant: Variant, layers: Layers, given: LendArguments) -> None:
        self.variant, self.layers, self.given = variant, layers, given
        self.ops: list[Op] = []
        self.moves: dict[Key, list[str]] = defaultdict(list)
        self.back: dict[Key, list[str]] = defaultdict(list)
        self._passes = {op.name: op for op in layers.ops if op.kind in PASSES}

    def written(self) -> Variant:
        """Return the variant with the new list; every dependency is written."""
        for op in self.layers.ops:
            if op.kind in PASSES:
                self._pass(op)
            else:
                held = KINDS[op.kind].cost not in ("compute", "transfer")
                self.ops.append(msgspec.structs.replace(op, deps=self._mapped(op, held)))
        ops = [self._applied(op) for op in self.ops]
        return msgspec.structs.replace(self.variant, ops=tuple(in_order(ops)))

    # -- passes ---------------------------------------------------------------------------------

    def _pass(self, op: Op) -> None:
        entry = before = self._mapped(op, False)
        for part in self.layers.cut(op):
            if (part.stage, part.label) in self.layers.moe:
                before = self._layer(part, before, entry if op.label else ())
            else:
                before = self._add(msgspec.structs.replace(part, deps=before))

    def _layer(self, op: Op, before: tuple[Dep, ...], entry: tuple[Dep, ...]) -> tuple[Dep, ...]:
        """Write a pass of a layer; return what the next one waits for.

        Args:
            op: the pass. before: what it waits for. entry: what its experts wait for as well.
        """
        if op.kind in FORWARD:
            return self._forward(op, before, entry)
        if op.kind == "W":
            first = self._add(self._experts(op, before))
            self._split_back(op, first)
            return self._add(msgspec.structs.replace(op, deps=before))
        if op.recompute == "inner" and self.layers.keeps(op) == "inputs":
            again = msgspec.structs.replace(op, kind="R", recompute="")
            before = (*before, *self._forward(again, before, entry))
            op = msgspec.structs.replace(op, recompute="")
        return self._backward(op, before, entry)

    def _forward(self, op: Op, before: tuple[Dep, ...], entry: tuple[Dep, ...]) -> tuple[Dep, ...]:
        again = "_r" if op.kind == "R" else ""
        key, given = (op.stage, op.label), self.given
        first = op.kind == "F" and op.mb == self.layers.first[op.stage]
        last = op.kind == "F" and op.mb == self.layers.last_forward[op.stage]
        lends, hidden = first and given.slots > 0, given.overlap and key in self.layers.before
        eager = lends and given.overlap and given.eager and not hidden
        if eager:
            self._move(key, -1, ())
        gated = self._add(msgspec.structs.replace(op, deps=before))
        if given.search and given.fresh and first:
            gated = (*gated, *self._search(op, gated))
        sent = self._exchange(op, f"dispatch{again}", gated)
        if given.search and not given.fresh and last:
            self._search(op, gated)
        if lends and not hidden and not eager:
            self._move(key, -1, sent)
        next_one = self.layers.after.get(key) if lends and given.overlap else None
        if next_one:
            self._move(next_one, 0, sent)
        lent = tuple(Dep(name) for name in self.moves[key]) if first else ()
        done = self._add(self._experts(op, (*sent, *lent, *entry)))
        back = self._exchange(op, f"combine{again}", done)
        if next_one:
            self._move(next_one, 1, back)
        return back

    def _backward(self, op: Op, before: tuple[Dep, ...], entry: tuple[Dep, ...]) -> tuple[Dep, ...]:
        key, given = (op.stage, op.label), self.given
        sent = self._exchange(op, "combine_b", before)
        final = op.mb == self.layers.last[op.stage] and not self.layers.split
        lends = final and given.slots > 0
        behind = self.layers.after.get(key) if lends and given.overlap else None
        if behind:
            self._return(behind, 1, sent)
        done = self._add(self._experts(op, (*sent, *entry)))
        back = self._exchange(op, "dispatch_b", done)
        waits = back
        if lends:
            hidden = given.overlap and key in self.layers.before
            summed = self._return(key, 0 if hidden else -1, back)
            waits = back if hidden or (given.overlap and given.eager) else summed
        return self._add(msgspec.structs.replace(op, deps=(*waits, *entry)))

    def _split_back(self, op: Op, made: tuple[Dep, ...]) -> None:
        """Of a split backward the weight gradients come last, and what follows hides their way."""
        if self.given.slots and op.mb == self.layers.last[op.stage]:
            self._return((op.stage, op.label), -1, made)

    # -- ops ------------------------------------------------------------------------------------

    def _add(self, op: Op) -> tuple[Dep, ...]:
        self.ops.append(op)
        return (Dep(op.name),)

    def _ref(self, key: Key, what: str) -> Ref | None:
        table = self.given.table
        return Ref(table, f"{self.layers.moe[key]}.{what}") if table else None

    def _experts(self, op: Op, deps: tuple[Dep, ...]) -> Op:
        """Only whole forwards are repeated for experts: they have no attention core."""
        forward = op.kind in FORWARD
        ref = self._ref((op.stage, op.label), "load" if forward else "load_b")
        return msgspec.structs.replace(
            op,
            label=experts_label(op.label),
            group="ep" if ref else "",
            ref=ref,
            deps=tuple(dict.fromkeys(deps)),
            saves="inputs" if op.saves == "inputs" else "all",
            recompute="",
        )

    def _exchange(self, op: Op, what: str, deps: tuple[Dep, ...]) -> tuple[Dep, ...]:
        key = (op.stage, op.label)
        for half in HALVES[: 1 + self.given.relayed]:
            deps = self._add(
                Op(
                    kind="ALL_TO_ALL", stage=op.stage, mb=op.mb, label=f"{op.label}/{what}{half}",
                    deps=deps, ref=self._ref(key, _WAYS[what] + half), channel=CHANNEL,
                )
            )  # fmt: skip
        return deps

    def _search(self, op: Op, gated: tuple[Dep, ...]) -> tuple[Dep, ...]:
        ref = Ref(self.given.search, SEARCHED)
        return self._add(
            Op(kind="HOST", stage=op.stage, label=op.label, deps=gated, amount=SEARCH, ref=ref)
        )

    def _move(self, key: Key, part: int, behind: tuple[Dep, ...]) -> None:
        """Parameters go out once they are updated and it is known where to."""
        planned = (Dep(f"{key[0]}HOST[{key[1]}]", 1),) if self.given.search else ()
        deps = (*behind, *self.layers.updated(key), *(() if self.given.fresh else planned))
        made = self._transfer("MOVE_EXPERT", key, part, "move", deps)
        self.moves[key].append(made[0].name)

    def _return(self, key: Key, part: int, behind: tuple[Dep, ...]) -> tuple[Dep, ...]:
        made = self._transfer("REDUCE_EXPERT", key, part, "reduce", behind)
        self.back[key].append(made[0].name)
        return made

    def _transfer(
        self, kind: str, key: Key, part: int, what: str, deps: tuple[Dep, ...]
    ) -> tuple[Dep, ...]:
        ref = self._ref(key, what if part < 0 else f"{what}.{part}")
        return self._add(
            Op(
                kind=kind, stage=key[0], part=part, label=key[1], channel=CHANNEL, ref=ref,
                deps=tuple(dict.fromkeys(deps)),
            )
        )  # fmt: skip

    # -- dependencies ---------------------------------------------------------------------------

    def _mapped(self, op: Op, held: bool) -> tuple[Dep, ...]:
        """An op's dependencies, those on passes put on what the passes became.

        Args:
            op: whose. held: it waits for the end of the passes' work, not for what they make.
        """
        found: list[Dep] = []
        for dep in op.deps or ():
            made = self._passes.get(dep.name)
            name = self._end(made, held) if made else dep.name
            found.append(Dep(name, dep.distance))
        return tuple(dict.fromkeys(found))

    def _end(self, op: Op, held: bool) -> str:
        last = self.layers.cut(op)[-1]
        if op.kind not in FORWARD or (last.stage, last.label) not in self.layers.moe:
            return last.name
        again = "_r" if op.kind == "R" else ""
        if held:
            return msgspec.structs.replace(last, label=experts_label(last.label)).name
        label = f"{last.label}/combine{again}{HALVES[self.given.relayed]}"
        return Op(kind="ALL_TO_ALL", stage=op.stage, mb=op.mb, label=label).name

    def _applied(self, op: Op) -> Op:
        """Updates, and sums over other holders of experts, wait for what lent ones bring back."""
        sums = op.kind == "REDUCE_GRAD" and of_experts(op.label)
        leaves = op.kind == "D2H" and op.amount != "parameters"
        if op.mb >= 0 or not (sums or leaves or op.kind == "OPT"):
            return op
        own = segment_of(op.label)
        back = [
            Dep(name)
            for (stage, label), names in self.back.items()
            if stage == op.stage and own in ("", label)
            for name in names
        ]
        return msgspec.structs.replace(op, deps=tuple(dict.fromkeys([*(op.deps or ()), *back])))
