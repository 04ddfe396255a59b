"""An op of a rank's program and its text form, e.g. ``2F0.1[mlp7] <- 2RECV_F0, OPT@1``.

Text form (in this order)::

    ^1            belongs to the iteration before this one
    2 F 0 .1 [x]  stage, kind, microbatch, part, label (segment, or edge of a transfer)
    :tp           group role of a collective    >3 or <3   explicit peer of a transfer
    {k=v, ...}    attributes: amount, ref, stream, channel, priority, saves, recompute, reads,
                  writes, slack
    <- X, Y@1     dependencies, which replace the implied ones; "<- none" for no dependency
"""

from __future__ import annotations

import re
from math import isfinite, nan

import msgspec

from sim.errors import PlanError
from sim.plan.kinds import KINDS

__all__ = ["Dep", "Op", "Ref", "format_op", "is_label", "parse_op"]


class Ref(msgspec.Struct, frozen=True, gc=False):
    """A late amount: the value of ``table`` at ``key``, ``lag`` steps earlier."""

    table: str
    key: str
    lag: int = 0


class Op(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One op: kind, where it belongs, its stream, its dependencies and amounts, never seconds.

    Args:
        kind: name in sim.plan.kinds.KINDS.
        stage: virtual stage, -1 when the cell holds exactly one or the op has none.
        mb: microbatch within the cell, -1 when the op has none.
        part: sub-batch index, -1 for the whole microbatch.
        label: segment, or edge of a transfer.
        group: role of a collective's group ("tp", "dp", "ep" ...), "" for the kind's default.
        peer: explicit peer rank of a transfer, -1 to follow the placement.
        deps: dependencies, or None for the implied ones.
        carried: 1 when the op belongs to the previous iteration.
        amount: key into the plan's amounts, "" for the default key of the op.
        ref: late amount, or None.
        stream: overrides the kind's stream ("host", "compute", ...).
        channel: second channel on the same members or pair.
        priority: key on a rank-local stream, smallest first; None for list order.
        saves: "all", "selective" (all but the attention core) or "inputs" (F only).
        recompute: "inner" when B contains the recomputation.
        reads: "latest" to wait for the last write appended before, "current" to take what is
            written at the start, "" for ops that read no version. writes: "next" when it makes one.
        slack: of an answer to a PULL: it is held back while its sender is more writes than this
            ahead of the slowest sender that has some left to send; -1 answers at once.
    """

    kind: str
    stage: int = -1
    mb: int = -1
    part: int = -1
    label: str = ""
    group: str = ""
    peer: int = -1
    deps: tuple[Dep, ...] | None = None
    carried: int = 0
    amount: str = ""
    ref: Ref | None = None
    stream: str = ""
    channel: int = 0
    priority: float | None = None
    saves: str = "all"
    recompute: str = ""
    reads: str = ""
    writes: str = ""
    slack: int = -1

    @property
    def name(self) -> str:
        """What a dependency on this op is written as."""
        return _name(self.stage, self.kind, self.mb, self.part, self.label)


class Dep(msgspec.Struct, frozen=True, gc=False):
    """A dependency on the op called ``name``, ``distance`` iterations earlier."""

    name: str
    distance: int = 0


def _name(stage: int, kind: str, mb: int, part: int, label: str) -> str:
    text = (str(stage) if stage >= 0 else "") + kind + (str(mb) if mb >= 0 else "")
    if part >= 0:
        text += f".{part}"
    return f"{text}[{label}]" if label else text


def is_label(text: str) -> bool:
    """Whether a label can be read back from an op's text; "" stands for none."""
    return re.fullmatch(r"[^\]\s]*", text) is not None


def _split_kind(text: str, whole: str) -> tuple[int, str, int]:
    """Split e.g. "2F0" or "D2H1"; kinds may contain digits, so try the registered names."""
    match = re.match(r"(\d*)(.*)\Z", text)
    assert match is not None
    stage, rest = match.group(1), match.group(2)
    best = ""
    for known in KINDS:
        if rest.startswith(known) and len(known) > len(best):
            tail = rest[len(known) :]
            if not tail or tail.isdigit():
                best = known
    if not best:
        raise PlanError(
            f"unknown op kind in {whole!r}",
            found=rest,
            expected="one of " + " ".join(sorted(KINDS)),
        )
    tail = rest[len(best) :]
    return (
        _number("stage", stage) if stage else -1,
        best,
        _number("microbatch", tail) if tail else -1,
    )


_TOKEN = re.compile(
    r"\s*(?:\^(?P<carried>\d+)\s*)?(?P<head>\d*[A-Z][A-Z0-9_]*)(?:\.(?P<part>\d+))?"
    r"(?:\[(?P<label>[^\]\s]+)\])?(?::(?P<group>[a-z_]+))?(?:[<>](?P<peer>\d+))?"
    r"(?:\{(?P<attrs>[^}]*)\})?"
)
_ARROW = re.compile(r"\s*<-\s*")
_REF = re.compile(
    r"\s*(?:\^(?P<carried>\d+)\s*)?(?P<name>\d*[A-Z][A-Z0-9_]*(?:\.\d+)?(?:\[[^\]\s]+\])?)(?:\s*@\s*(?P<d>\d+))?"
)
MAX_DIGITS = 9
_INTS = {"channel", "slack"}
_TEXTS = {"amount", "stream", "saves", "recompute", "reads", "writes"}


def parse_op(text: str, pos: int = 0) -> tuple[Op, int]:
    """Read one op at ``text[pos:]``.

    Returns:
        The op and the position after it.

    Raises:
        PlanError: the text is not an op.
    """
    match = _TOKEN.match(text, pos)
    if match is None:
        raise PlanError(
            "not an op", found=repr(text[pos : pos + 40].strip()), expected="e.g. 2F0.1[x]"
        )
    stage, kind_name, mb = _split_kind(match["head"], match.group(0).strip())
    fields: dict[str, object] = {"stage": stage, "kind": kind_name, "mb": mb}
    for key in ("carried", "part", "peer"):
        if match[key] is not None:
            fields[key] = _number(key, match[key])
    for key in ("label", "group"):
        if match[key] is not None:
            fields[key] = match[key]
    if match["attrs"]:
        fields |= _parse_attrs(match["attrs"])
    pos = match.end()
    arrow = _ARROW.match(text, pos)
    if arrow is not None:
        deps, pos = _parse_deps(text, arrow.end(), _number("carried", match["carried"] or "0"))
        fields["deps"] = deps
    return msgspec.convert(fields, Op), pos


def _parse_attrs(text: str) -> dict[str, object]:
    fields: dict[str, object] = {}
    for item in text.split(","):
        key, _, value = item.strip().partition("=")
        if key in _INTS:
            fields[key] = _number(key, value)
        elif key == "priority":
            fields[key] = _priority(value)
        elif key in _TEXTS:
            fields[key] = value
        elif key == "ref":
            table, _, rest = value.partition("/")
            name, _, lag = rest.partition("@")
            fields[key] = {"table": table, "key": name, "lag": _number("ref", lag or "0")}
        else:
            raise PlanError(
                "unknown op attribute",
                found=key,
                expected=" ".join(sorted(_INTS | _TEXTS | {"priority", "ref"})),
            )
    return fields


def _number(key: str, text: str) -> int:
    """A small whole number, as an attribute or part of a name."""
    if not text.isascii() or not text.isdigit() or len(text) > MAX_DIGITS:
        raise PlanError(
            "not a small whole number", key=key, found=text[:40], expected="0 to 999999999"
        )
    return int(text)


def _priority(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = nan
    if not isfinite(value):
        raise PlanError(
            "not a finite priority", key="priority", found=text[:40], expected="a number"
        )
    return value


def _parse_deps(text: str, pos: int, carried: int) -> tuple[tuple[Dep, ...], int]:
    """``^1 X`` names the X that belongs to the iteration before this one, whoever depends on it."""
    if text.startswith("none", pos):
        return (), pos + 4
    deps = []
    while True:
        match = _REF.match(text, pos)
        if match is None:
            raise PlanError(
                "not a dependency", found=repr(text[pos : pos + 30].strip()), expected="X or X@1"
            )
        shift = _number("carried", match["carried"]) - carried if match["carried"] else 0
        deps.append(Dep(match["name"], _number("distance", match["d"] or "0") + shift))
        pos = match.end()
        comma = re.match(r"\s*,", text[pos:])
        if comma is None:
            return tuple(deps), pos
        pos += comma.end()


def format_op(op: Op) -> str:
    """Write an op so that ``parse_op`` reads the same op back."""
    text = f"^{op.carried} " if op.carried else ""
    text += op.name
    if op.group:
        text += f":{op.group}"
    if op.peer >= 0:
        text += f">{op.peer}"
    attrs = [
        f"{k}={getattr(op, k)}"
        for k in ("amount", "stream", "recompute", "reads", "writes")
        if getattr(op, k)
    ]
    if op.saves != "all":
        attrs.append(f"saves={op.saves}")
    if op.channel:
        attrs.append(f"channel={op.channel}")
    if op.slack >= 0:
        attrs.append(f"slack={op.slack}")
    if op.priority is not None:
        attrs.append(f"priority={op.priority!r}")
    if op.ref is not None:
        attrs.append(f"ref={op.ref.table}/{op.ref.key}" + (f"@{op.ref.lag}" if op.ref.lag else ""))
    if attrs:
        text += "{" + ", ".join(attrs) + "}"
    if op.deps is not None:
        deps = ", ".join(d.name + (f"@{d.distance}" if d.distance else "") for d in op.deps)
        text += f" <- {deps or 'none'}"
    return text
