"""Pipeline schedules as pure functions: (positions, microbatches) -> order of compute ops.

Each returns, per pipeline position, the list of (kind, virtual stage, microbatch) in list order.
Virtual stage v of an interleaved schedule sits on position v mod P.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence

from sim.errors import InputError

__all__ = [
    "SCHEDULES",
    "Order",
    "Slot",
    "explicit_order",
    "gpipe",
    "interleaved_1f1b",
    "one_f_one_b",
    "num_microbatches",
    "positions",
    "text_grid",
    "time_slots",
    "zb_h1",
]

Slot = tuple[str, int, int]
Order = list[list[Slot]]


def _check(num_stages: int, num_microbatches: int) -> None:
    if num_stages < 1 or num_microbatches < 1:
        raise InputError(
            "a schedule needs at least one stage and one microbatch",
            key="pipeline",
            found=f"{num_stages} stages, {num_microbatches} microbatches",
            expected="both >= 1",
        )


def gpipe(num_stages: int, num_microbatches: int) -> Order:
    """All forwards, then all backwards in the same order (Huang et al. 2019, section 2.3).

    Raises:
        InputError: no stage or no microbatch.
    """
    _check(num_stages, num_microbatches)
    mbs = range(num_microbatches)
    return [[("F", s, i) for i in mbs] + [("B", s, i) for i in mbs] for s in range(num_stages)]


def one_f_one_b(num_stages: int, num_microbatches: int) -> Order:
    """One forward, one backward (Narayanan et al. 2021, section 2.2.1).

    Position s runs min(m, P - 1 - s) forwards first; fewer microbatches than stages are legal.

    Raises:
        InputError: no stage or no microbatch.
    """
    _check(num_stages, num_microbatches)
    order: Order = []
    for s in range(num_stages):
        warmup = min(num_microbatches, num_stages - 1 - s)
        slots: list[Slot] = [("F", s, i) for i in range(warmup)]
        for i in range(warmup, num_microbatches):
            slots += [("F", s, i), ("B", s, i - warmup)]
        slots += [("B", s, i) for i in range(num_microbatches - warmup, num_microbatches)]
        order.append(slots)
    return order


def interleaved_1f1b(num_stages: int, num_microbatches: int, num_chunks: int = 2) -> Order:
    """Interleaved 1F1B (Narayanan et al. 2021, section 2.2.2).

    Microbatches go in groups of P through chunk 0, then chunk 1 ...; position s runs
    2 (P - s - 1) + (V - 1) P forwards first.

    Raises:
        InputError: the number of microbatches is not a multiple of the number of stages.
    """
    _check(num_stages, num_microbatches)
    p, m, v = num_stages, num_microbatches, num_chunks
    if v == 1:
        return one_f_one_b(p, m)
    if m % p:
        low, high = m // p * p, (m // p + 1) * p
        raise InputError(
            "interleaved 1F1B needs a multiple of the pipeline size as number of microbatches",
            key="pipeline.microbatches",
            found=f"{m} microbatches on {p} stages",
            expected=f"{high}" if low == 0 else f"{low} or {high}",
        )
    total = m * v

    def at(k: int, forward: bool) -> tuple[int, int]:
        group, inside = divmod(k, p * v)
        chunk = inside // p
        return (chunk if forward else v - 1 - chunk), group * p + inside % p

    order: Order = []
    for s in range(p):
        warmup = min(total, 2 * (p - s - 1) + (v - 1) * p)
        slots: list[Slot] = []
        for k in range(total + warmup):
            if k < total:
                chunk, mb = at(k, True)
                slots.append(("F", chunk * p + s, mb))
            if k >= warmup:
                chunk, mb = at(k - warmup, False)
                slots.append(("B", chunk * p + s, mb))
        order.append(slots)
    return order


def zb_h1(num_stages: int, num_microbatches: int) -> Order:
    """Zero-bubble H1: B split into I and W, same peak memory as 1F1B (Qi et al. 2023, section 2.1).

    Position s delays W by s microbatches, so that the last position fills its drain with them.

    Raises:
        InputError: no stage or no microbatch.
    """
    _check(num_stages, num_microbatches)
    order: Order = []
    m = num_microbatches
    for s in range(num_stages):
        warmup = min(m, num_stages - 1 - s)
        slots: list[Slot] = [("F", s, i) for i in range(warmup)]
        done_w = 0
        for i in range(m):
            if warmup + i < m:
                slots.append(("F", s, warmup + i))
            slots.append(("I", s, i))
            if i >= s:
                slots.append(("W", s, done_w))
                done_w += 1
        slots += [("W", s, i) for i in range(done_w, m)]
        order.append(slots)
    return order


SCHEDULES: dict[str, Callable[..., Order]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved_1f1b,
    "zb-h1": zb_h1,
}


def text_grid(order: Order) -> str:
    """One row per position, one cell per slot, in list order: what torch's pipelining prints.

    Returns:
        Text with columns aligned over all rows.
    """
    rows = [[f"{v}{kind}{mb}" for kind, v, mb in slots] for slots in order]
    width = max((len(c) for r in rows for c in r), default=1)
    head = len(str(len(rows) - 1))
    return "\n".join(
        f"{s:>{head}}: " + " ".join(c.ljust(width) for c in r).rstrip() for s, r in enumerate(rows)
    )


_SLOT = re.compile(r"(\d+)([FBIW])(\d+)")


def explicit_order(rows: Sequence[str]) -> Order:
    """Read an order written out, one row per pipeline position, e.g. ``"0F0 0F1 0B0 0B1"``.

    Raises:
        InputError: a row is malformed, a virtual stage stands in two rows or in none, a microbatch
            lacks its F or its B (or I and W), or the order can never finish.
    """
    order: Order = []
    for number, row in enumerate(rows):
        slots: list[Slot] = []
        for word in row.split():
            match = _SLOT.fullmatch(word)
            if match is None:
                raise InputError(
                    f"not a compute op in row {number} of the schedule",
                    key=f"schedule.{number}",
                    found=word,
                    expected="stage, F, B, I or W, microbatch: e.g. 2F0",
                )
            slots.append((match[2], int(match[1]), int(match[3])))
        order.append(slots)
    positions(order)
    _check_complete(order)
    time_slots(order)
    return order


def positions(order: Order) -> dict[int, int]:
    """Pipeline position of each virtual stage.

    Raises:
        InputError: a stage stands in two rows, or stages are not numbered from 0.
    """
    found: dict[int, int] = {}
    for position, slots in enumerate(order):
        for _, stage, _ in slots:
            if found.setdefault(stage, position) != position:
                raise InputError(
                    "a stage stands in two rows of the schedule",
                    key=f"schedule.{position}",
                    found=f"stage {stage} in rows {found[stage]} and {position}",
                    expected="each stage in one row",
                )
    if sorted(found) != list(range(len(found))) or not found or not all(order):
        raise InputError(
            "a schedule needs every stage, and a stage in every row",
            key="schedule",
            found=f"stages {' '.join(map(str, sorted(found))) or 'none'} in {len(order)} rows",
            expected="stages numbered from 0",
        )
    return found


def num_microbatches(order: Order) -> int:
    """Microbatches of an order."""
    return 1 + max(mb for slots in order for _, _, mb in slots)


def _check_complete(order: Order) -> None:
    seen = Counter(slot for slots in order for slot in slots)
    for stage in sorted({s for _, s, _ in seen}):
        for mb in range(num_microbatches(order)):
            f, b, i, w = (seen[kind, stage, mb] for kind in "FBIW")
            if f != 1 or (b, i, w) not in ((1, 0, 0), (0, 1, 1)):
                raise InputError(
                    f"microbatch {mb} of stage {stage} needs one F and one B, or one I and one W",
                    key=f"schedule.{positions(order)[stage]}",
                    found=f"{f} F, {b} B, {i} I, {w} W",
                    expected="1 F and 1 B, or 1 F, 1 I and 1 W",
                )


def time_slots(order: Order) -> list[list[Slot | None]]:
    """Lay an order out in equal time slots, None where a position is idle.

    Raises:
        InputError: the order can never finish.
    """
    split = {(s, i) for slots in order for kind, s, i in slots if kind == "I"}
    last = max(s for slots in order for _, s, _ in slots)
    done: dict[Slot, int] = {}
    at = [0] * len(order)
    grid: list[list[Slot | None]] = [[] for _ in order]

    def needs(slot: Slot) -> list[Slot]:
        kind, s, i = slot
        if kind == "F":
            return [("F", s - 1, i)] if s else []
        if kind == "W":
            return [("I", s, i)]
        above = ("I" if (s + 1, i) in split else "B", s + 1, i)
        return [("F", s, i)] + ([above] if s < last else [])

    while any(at[p] < len(slots) for p, slots in enumerate(order)):
        now = len(grid[0])
        ready = [
            slots[at[p]]
            if at[p] < len(slots) and all(done.get(n, now) < now for n in needs(slots[at[p]]))
            else None
            for p, slots in enumerate(order)
        ]
        if not any(ready):
            stuck = next(slots[at[p]] for p, slots in enumerate(order) if at[p] < len(slots))
            raise InputError(
                "the schedule can never finish: its rows wait for one another",
                key="schedule",
                found=f"{stuck[1]}{stuck[0]}{stuck[2]} comes before what it needs",
            )
        for p, slot in enumerate(ready):
            grid[p].append(slot)
            if slot is not None:
                done[slot] = now
                at[p] += 1
    return grid
