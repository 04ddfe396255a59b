"""Lowering pass ``offload``: segments that live on the host, and work that crosses the step.

Per segment, as the placement says:

* optimizer on the host: backward, REDUCE_GRAD, D2H of the gradient, OPT on the host, H2D of the
  updated parameters, for which the next step's forward waits and for nothing else;
* parameters on the host: a fetch before each use, into a ring of buffers whose slot the use before
  must have left; an updated copy goes back where the optimizer stays on the chip.

With several microbatches the gradient adds up on the chip and leaves after the last.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Literal, get_args

import msgspec

from sim.errors import PlanError
from sim.plan.deps import resolve
from sim.plan.flat import flatten
from sim.plan.op import Dep, Op, Ref
from sim.plan.placement import Segment
from sim.plan.plan import Plan
from sim.plan.variant import Variant, program_of
from strategies.offload.kinds import FETCH_B, FETCH_F

__all__ = ["CLIPPING", "Clipping", "SPECULATION", "offload"]

Clipping = Literal["none", "per-block", "previous-norm", "speculate", "global"]
CLIPPING: tuple[Clipping, ...] = get_args(Clipping)
"""What an update waits for: nothing, and nothing is clipped; nothing; the norm of the step before;
nothing, but a failed check is rolled back; the norm of all gradients of its own step."""
SPECULATION = "speculation"
"""Table of late amounts under "speculate": "rollback" 1 in a step whose check fails, else 0;
"forward" 2 in the step after, whose forward has to be repeated, else 1; shares stand for means."""
NORM = "norm"
"""Label of the HOST op that finds the norm, and of the one that checks it."""
ROLLBACK = "rollback"


def offload(variants: list[Variant], plan: Plan, args: dict[str, Any]) -> list[Variant]:
    """Cut stages into their segments and add what the host does for them.

    Args:
        variants, plan: of the lowering.
        args: ``priority``: host streams serve the first segments first (else list order).
            ``clipping``: one of ``CLIPPING``. ``whole_steps``: nothing of a step begins before the
            step before has ended on its rank.

    Raises:
        PlanError: unknown clipping; a plan that this pass does not carry (experts over several
            replicas, a tied parameter on two positions, blocking transfers, ZeRO with parameters on
            the host).
    """
    clipping = args.get("clipping", "none")
    if clipping not in CLIPPING:
        raise PlanError(
            "unknown clipping", key="lowering.offload", found=clipping, expected=" ".join(CLIPPING)
        )
    segments: dict[int, list[Segment]] = defaultdict(list)
    for s in plan.placement.segments:
        segments[s.stage].append(s)
    _check(variants, plan, segments)
    priority, whole = bool(args.get("priority", True)), bool(args.get("whole_steps", False))
    return [_Pass(v, plan, segments, priority, clipping, whole).run() for v in variants]


def _check(variants: list[Variant], plan: Plan, segments: dict[int, list[Segment]]) -> None:
    away = any("parameters" in s.offload for mine in segments.values() for s in mine)
    reasons = {
        "experts spread over replicas": plan.placement.ep > 1,
        "a parameter that two positions share": any(
            op.kind == "ALL_REDUCE" and op.label == "embed" for v in variants for op in v.ops
        ),
        "parameters on the host under ZeRO": away and plan.mathematics.zero > 0,
        "blocking transfers": any(
            op.kind in ("F", "B", "I", "W") and op.deps is not None
            for v in variants
            for op in v.ops
        ),
    }
    for what, found in reasons.items():
        if found:
            raise PlanError(f"offload does not carry {what}", key="lowering.offload")


class _Pass:
    """One variant on its way through the pass.

    Attributes:
        ops: the list so far. extra: dependencies of an op, by its name, beside the implied ones.
        order: number of each segment of this position, in the order of the forward.
    """

    def __init__(
        self,
        variant: Variant,
        plan: Plan,
        segments: dict[int, list[Segment]],
        priority: bool,
        clipping: Clipping,
        whole: bool,
    ) -> None:
        self.variant, self.plan, self.clipping, self.whole = variant, plan, clipping, whole
        self.priority, self.segments = priority, segments
        self.hosted = frozenset(s for s in segments if segments[s][0].cell == variant.position)
        self.one = variant.microbatches == 1
        self.ops: list[Op] = []
        self.extra: dict[str, list[Dep]] = defaultdict(list)
        mine = [(s.stage, s.name) for stage in sorted(self.hosted) for s in segments[stage]]
        self.order = {key: i for i, key in enumerate(mine)}
        self.late: list[Op] = []
        self.ready: list[str] = []

    def run(self) -> Variant:
        """Return the variant with its new list."""
        self._segments()
        self._gradients()
        self._norm()
        self._first_uses()
        self._fetches()
        v = msgspec.structs.replace(self.variant, ops=tuple(self.ops))
        found = resolve(flatten(program_of(v, False)), self.hosted)
        written = []
        for i, op in enumerate(v.ops):
            extra = self.extra.get(op.name)
            if extra:
                implied = [Dep(v.ops[j].name, d) for j, d in found[i]]
                op = msgspec.structs.replace(op, deps=tuple(dict.fromkeys([*implied, *extra])))
            written.append(op)
        return msgspec.structs.replace(v, ops=tuple(written))

    def _key(self, segment: Segment, kind: str = "") -> float | None:
        """What the forward needs first comes first; what this backward needs, before all that."""
        if not self.priority:
            return None
        place = self.order[segment.stage, segment.name]
        return float(-1 - place if kind == FETCH_B.name else place)

    def _op(self, kind: str, s: Segment, *deps: str, **fields: Any) -> Op:
        written = tuple(Dep(d) for d in deps) if deps else None
        return Op(kind=kind, stage=s.stage, label=s.name, deps=written, **fields)

    # -- passes by segment ----------------------------------------------------------------------

    def _segments(self) -> None:
        """F of a stage as its segments' F, B, I and W likewise, backwards."""
        for op in self.variant.ops:
            if op.kind not in ("F", "B", "I", "W"):
                self.ops.append(op)
                continue
            mine = self.segments[op.stage]
            for s in mine if op.kind == "F" else reversed(mine):
                drops = (s.recompute or self.variant.recompute) == "full"
                fields: dict[str, Any] = {"label": s.name}
                if s.recompute and op.kind == "F":
                    fields["saves"] = "inputs" if drops else "all"
                if s.recompute and op.kind in ("B", "I"):
                    fields["recompute"] = "inner" if drops else ""
                if op.kind == "F" and self.clipping == "speculate":
                    fields["ref"] = Ref(SPECULATION, "forward")
                self.ops.append(msgspec.structs.replace(op, **fields))

    # -- gradients and updates ------------------------------------------------------------------

    def _gradients(self) -> None:
        """What follows the last backward op of each segment, in place of the stage's own tail."""
        old = self.ops
        reduced = {op.stage for op in old if op.kind == "REDUCE_GRAD"}
        gathered = {op.stage for op in old if op.kind == "UNSHARD"}
        last = {(op.stage, op.label): i for i, op in enumerate(old) if op.kind in ("B", "W")}
        places = {i: key for key, i in last.items()}
        named = {(s.stage, s.name): s for mine in self.segments.values() for s in mine}
        waiting: list[Op] = []
        sent: list[str] = []
        self.ops = []
        for i, op in enumerate(old):
            if op.kind in ("REDUCE_GRAD", "OPT", "UNSHARD"):
                continue
            self.ops.append(op)
            if i not in places:
                continue
            s, source = named[places[i]], op.name
            # Updates on the chip stand behind the next backward, so as not to wait for a reduce.
            self.ops += waiting
            waiting = []
            if s.stage in reduced:
                self.ops.append(self._op("REDUCE_GRAD", s))
                source = self.ops[-1].name
            updated = self._update(s, source, s.stage in gathered)
            if "optimizer" in s.offload:
                self._ring(s, op, sent)
                self.ops += updated[:2]
                self.late += updated[2:]
            elif self.clipping == "global":
                self.late += updated
            elif s.stage in reduced:
                waiting = updated
            else:
                self.ops += updated
        self.ops += [*waiting, *self.late]

    def _update(self, s: Segment, source: str, gathers: bool) -> list[Op]:
        """The update of a segment whose gradient ``source`` completes."""
        key = self._key(s)
        if "optimizer" in s.offload:
            copy = self._op("D2H", s, source, priority=key)
            update = self._op("OPT", s, copy.name, stream="host", priority=key)
            found = [copy, update]
            if "parameters" not in s.offload:
                found.append(self._op("H2D", s, update.name, priority=key))
            self.ready.append(copy.name)
        else:
            self.ready.append(source)
            found = [self._op("OPT", s, source)]
            if "parameters" in s.offload:
                after = found[-1].name
                found.append(self._op("D2H", s, after, amount="parameters", priority=key))
        if gathers:
            found.append(self._op("UNSHARD", s, found[-1].name))
        return found

    def _ring(self, s: Segment, op: Op, sent: list[str]) -> None:
        """With one microbatch a gradient takes a buffer that an earlier one has left."""
        slots = self.plan.placement.gradient_buffers
        if self.one and len(sent) >= slots:
            self.extra[op.name].append(Dep(sent[-slots]))
        sent.append(self._op("D2H", s).name)

    def _norm(self) -> None:
        """The norm of all gradients, and who waits for it.

        The host adds up the squares of what landed there; the chip's share is a by-product of its
        backward, and the sum over ranks is free.
        """
        if self.clipping in ("none", "per-block"):
            return
        updates = [op for op in self.ops if op.kind == "OPT"]
        stage, deps = min(self.hosted), tuple(Dep(name) for name in self.ready)
        key = float(len(self.order)) if self.priority else None
        norm = Op(kind="HOST", stage=stage, label=NORM, deps=deps, priority=key)
        if not any(op.stream == "host" for op in updates):
            if self.clipping == "global":
                self._wait(deps)
        elif self.clipping == "global":
            # The norm comes before every update in the list, as it does in time.
            rest = [op for op in self.ops if op.kind != "OPT"]
            at = 1 + max(i for i, op in enumerate(rest) if op.name in self.ready)
            self.ops = [*rest[:at], norm, *updates, *rest[at:]]
            self._wait((Dep(norm.name),))
        else:
            at = 1 + max(i for i, op in enumerate(self.ops) if op.name in self.ready)
            self.ops.insert(at, norm)
            if self.clipping == "speculate":
                self._roll_back(norm, updates)
            else:
                self._wait((Dep(norm.name, 1),))

    def _wait(self, deps: tuple[Dep, ...]) -> None:
        """Every update waits for these as well."""
        self.ops = [
            msgspec.structs.replace(op, deps=tuple(dict.fromkeys([*(op.deps or ()), *deps])))
            if op.kind == "OPT"
            else op
            for op in self.ops
        ]

    def _roll_back(self, norm: Op, updates: list[Op]) -> None:
        """Updates run before the check; the next backward waits until none is to be undone."""
        undo = Op(
            kind="HOST",
            stage=norm.stage,
            label=ROLLBACK,
            deps=(Dep(norm.name), *(Dep(op.name) for op in updates)),
            ref=Ref(SPECULATION, "rollback"),
            priority=norm.priority,
        )
        self.ops.append(undo)
        first = next(op for op in self.ops if op.kind in ("B", "I"))
        self.extra[first.name].append(Dep(undo.name, 1))

    # -- parameters -----------------------------------------------------------------------------

    def _first_uses(self) -> None:
        """The next step's first forward of a segment waits for its updated parameters."""
        arrivals = {(op.stage, op.label): op for op in self.ops if op.kind == "H2D"}
        for op in self.ops:
            arrival = arrivals.pop((op.stage, op.label), None) if op.kind == "F" else None
            if arrival is not None:
                self.extra[op.name].append(Dep(arrival.name, 1))
        if self.whole:
            first = next(op for op in self.ops if op.kind == "F")
            self.extra[first.name] += self._ended()

    def _ended(self) -> list[Dep]:
        """What ends a step."""
        kinds = ("OPT", "H2D", "D2H", "HOST", "UNSHARD")
        return [Dep(op.name, 1) for op in self.ops if op.kind in kinds]

    def _fetches(self) -> None:
        """Fetches of parameters that live on the host, each as early as a buffer may be free.

        Consecutive uses of one segment share a fetch: the last block's forward and backward.
        """
        away = {
            (s.stage, s.name): s
            for mine in self.segments.values()
            for s in mine
            if "parameters" in s.offload
        }
        holds: list[list[int]] = []
        for i, op in enumerate(self.ops):
            if op.kind not in ("F", "B", "I") or (op.stage, op.label) not in away:
                continue
            last = self.ops[holds[-1][-1]] if holds else None
            if last and (last.stage, last.label) == (op.stage, op.label):
                holds[-1].append(i)
            else:
                holds.append([i])
        slots = self.plan.placement.parameter_buffers
        listed: dict[int, list[Op]] = defaultdict(list)
        for k, uses in enumerate(holds):
            op = self.ops[uses[0]]
            s = away[op.stage, op.label]
            kind = FETCH_F.name if op.kind == "F" else FETCH_B.name
            source = "OPT" if "optimizer" in s.offload else "D2H"
            # The ring goes round: the first slots were left in a step before.
            steps, before = divmod(k - slots, len(holds))
            deps = [
                Dep(self._op(source, s).name, 1),
                Dep(self.ops[holds[before][-1]].name, -steps),
                *(self._ended() if self.whole and k < slots else ()),
            ]
            fetch = self._op(kind, s, mb=op.mb, priority=self._key(s, kind))
            fetch = msgspec.structs.replace(fetch, deps=tuple(dict.fromkeys(deps)))
            for use in uses:
                self.extra[self.ops[use].name].append(Dep(fetch.name))
            listed[holds[k - slots][-1] if k >= slots else -1].append(fetch)
        ops = list(listed[-1])
        for i, op in enumerate(self.ops):
            ops += [op, *listed[i]]
        self.ops = ops
