"""The eight miniature plans: one for each system the plan format must carry."""

from __future__ import annotations

from collections.abc import Mapping

from sim.cost.prices import FlowSpec
from sim.cost.stated import StatedFlow, stated_prices
from sim.engine.simulate import Layout, Run, lay_out, run_layout
from sim.plan.op import Op
from sim.plan.placement import Boundary, Cell, Placement, Segment
from sim.plan.plan import Plan, ProgramText, Table
from sim.plan.tables import controller


class Miniature:
    """A plan, its stated seconds and its stated makespan."""

    def __init__(
        self,
        plan: Plan,
        seconds: Mapping[str, float | StatedFlow],
        makespan: float,
        steps: int = 1,
        link_rates: Mapping[str, float] | None = None,
        messages: Mapping[str, float] | None = None,
    ) -> None:
        self.plan, self.seconds, self.makespan, self.steps = plan, dict(seconds), makespan, steps
        self.link_rates, self.messages = link_rates, messages

    def layout(self, fold: bool = True) -> Layout:
        return lay_out(self.plan, steps=self.steps, fold=fold)

    def run(self, fold: bool = True, factor: float = 1.0) -> Run:
        seconds = {
            k: v * factor if isinstance(v, float | int) else v for k, v in self.seconds.items()
        }
        rates = {k: v / factor for k, v in (self.link_rates or {}).items()}

        def message(op: Op, rank: int, sender: int) -> tuple[float, tuple[FlowSpec, ...]]:
            assert self.messages is not None
            return self.messages[op.kind] * factor, ()

        return run_layout(
            self.layout(fold),
            lambda lay: stated_prices(lay.graph, seconds, rates, lay.late),
            message_price=message if self.messages else None,
        )


def _cells(*tp: int) -> tuple[Cell, ...]:
    cells, first = [], 0
    for stage, size in enumerate(tp):
        cells.append(Cell(stage=stage, replica=0, ranks=tuple(range(first, first + size)), tp=size))
        first += size
    return tuple(cells)


def _segments(n: int) -> tuple[Segment, ...]:
    return tuple(Segment(stage=s, cell=s) for s in range(n))


def _chain(n: int) -> tuple[Boundary, ...]:
    return tuple(Boundary(src=s, dst=s + 1) for s in range(n - 1))


def h2(
    *,
    fused: bool = False,
    gather: float = 0.25,
    buffers: int = 2,
    nic_per_piece: bool | None = None,
) -> Miniature:
    """HeteroPP: unlike cells per stage, transfers between unequal TP, P2P under W."""
    last = "RECV_F{i} 1F{i} 1B{i} SEND_B{i}" if fused else "RECV_F{i} 1F{i} 1I{i} SEND_B{i} 1W{i}"
    plan = Plan(
        name="h2",
        barrier=False,
        buffers=buffers,
        placement=Placement(
            cells=_cells(2, 1), segments=_segments(2), boundaries=_chain(2), microbatches=(2,)
        ),
        programs=(
            ProgramText(
                (0, 1),
                "0F0 SEND_F0 0F1 SEND_F1 | RECV_B0 ALL_GATHER0[b] 0B0"
                " | RECV_B1 ALL_GATHER1[b] 0B1 | OPT",
            ),
            ProgramText((2,), " | ".join(last.format(i=i) for i in (0, 1)) + " | OPT"),
        ),
    )
    seconds: dict[str, float | StatedFlow] = {
        "F": 1,
        "0B": 2,
        "1B": 2,
        "I": 1,
        "W": 1,
        "SEND_F": 0.5,
        "SEND_B": 0.5,
        "ALL_GATHER": gather,
        "OPT": 0.25,
    }
    rates = None
    if nic_per_piece is not None:
        # A piece is half of the tensor; one NIC moves the tensor in 0.5 s, a piece alone in 0.25 s.
        rates = {"nic": 4.0 if nic_per_piece else 2.0}
        seconds |= {
            "SEND_F": StatedFlow(links=("nic",), nbytes=0.5),
            "SEND_B": StatedFlow(links=("nic",), nbytes=0.5),
        }
    return Miniature(plan, seconds, 10.5 if fused else 9.5, link_rates=rates)


@controller("lend-hottest")
def _lend(read: dict[str, dict[str, object]]) -> dict[str, object]:
    """Lend expert 0 to rank 1 when that evens the load out: what a planner would do with b1."""
    counts = read["counts"]["b1"]
    assert isinstance(counts, list)
    load = [sum(row) for row in counts]
    even = sum(load) / len(load)
    lends = max(load) > 1.5 * even
    return {
        "moved": 1.5 if lends else 0.0,
        "load": [even, even] if lends else load,
        "received": 0.0 if lends else 3.0,
    }


def pro_prophet() -> Miniature:
    """Pro-Prophet: experts lent into slots, transfers split over neighbouring windows."""
    text = """
    ALL_TO_ALL.0[b0]{ref=routed/b0} MOVE_EXPERT.0[b1]{ref=lent/moved@1} <- ALL_TO_ALL.0[b0]
    F[e0]{ref=load/b0} <- ALL_TO_ALL.0[b0]
    ALL_TO_ALL.1[b0]{ref=routed/b0} <- F[e0]
    MOVE_EXPERT.1[b1]{ref=lent/moved@1} <- ALL_TO_ALL.1[b0]
    F[n0] <- ALL_TO_ALL.1[b0]
    ALL_TO_ALL.0[b1]{ref=lent/received@1} <- F[n0]
    HOST <- F[n0]
    F[e1]{ref=lent/load@1} <- MOVE_EXPERT.1[b1], ALL_TO_ALL.0[b1]
    ALL_TO_ALL.1[b1]{ref=lent/received@1} <- F[e1]
    F[n1] <- ALL_TO_ALL.1[b1]
    B[n1] <- F[n1]
    ALL_TO_ALL.2[b1]{ref=lent/received@1} <- B[n1]
    B[e1]{ref=lent/load@1} <- ALL_TO_ALL.2[b1]
    ALL_TO_ALL.3[b1]{ref=lent/received@1} <- B[e1]
    REDUCE_EXPERT.0[b1]{ref=lent/moved@1} <- ALL_TO_ALL.3[b1]
    B[n0] <- ALL_TO_ALL.3[b1]
    ALL_TO_ALL.2[b0]{ref=routed/b0} <- B[n0]
    REDUCE_EXPERT.1[b1]{ref=lent/moved@1} <- ALL_TO_ALL.2[b0]
    B[e0]{ref=load/b0} <- ALL_TO_ALL.2[b0]
    ALL_TO_ALL.3[b0]{ref=routed/b0} <- B[e0]
    OPT <- ALL_TO_ALL.3[b0], REDUCE_EXPERT.1[b1], REDUCE_EXPERT.0[b1]
    BARRIER
    """
    cells = tuple(Cell(stage=0, replica=r, ranks=(r,)) for r in (0, 1))
    plan = Plan(
        name="pro-prophet",
        placement=Placement(cells=cells, segments=_segments(1), microbatches=(1, 1), ep=2),
        programs=(ProgramText((0, 1), text),),
        tables={
            "counts": Table(values={"b1": [[[4, 3], [0, 1]]]}),
            "routed": Table(values={"b0": [2.0]}),
            "load": Table(values={"b0": [[4, 4]]}),
            "lent": Table(
                origin="controller",
                controller="lend-hottest",
                inputs=("counts",),
                initial={"moved": 0.0, "load": [7, 1], "received": 3.0},
            ),
        },
    )
    seconds = {
        "F[e0]": 0.25,
        "F[e1]": 0.25,
        "B[e0]": 0.5,
        "B[e1]": 0.5,
        "F": 1.0,
        "B": 2.0,
        "ALL_TO_ALL": 0.25,
        "MOVE_EXPERT": 0.5,
        "REDUCE_EXPERT": 0.5,
        "HOST": 0.25,
        "OPT": 0.5,
    }
    return Miniature(plan, seconds, 34.25, steps=2)


def async_sgd(*, eager_reply: bool = False) -> Miniature:
    """Asynchronous SGD: on blocks, versions, delay as the outcome of timing."""
    worker = "repeat({n}){{ PULL>0 <- PUSH@1 ; F <- PULL ; B <- F ; PUSH>0 <- B }}"
    reply = (
        "on(PULL){ SEND_F{reads=current} }" if eager_reply else "on(PULL){ SEND_F{reads=latest} }"
    )
    plan = Plan(
        name="async",
        exact=False,
        reason="updates are applied late",
        barrier=False,
        placement=Placement(extra_ranks=(0, 1, 2)),
        programs=(
            ProgramText((0,), "on(PUSH){ APPLY{writes=next} } " + reply),
            ProgramText((1,), worker.format(n=3)),
            ProgramText((2,), worker.format(n=2)),
        ),
    )
    seconds = {"PULL": 0.0, "PUSH": 0.5, "rank 1 F": 1, "rank 1 B": 2, "rank 2 F": 2, "rank 2 B": 4}
    return Miniature(
        plan, seconds, 14.25 if eager_reply else 14.5, messages={"APPLY": 0.25, "SEND_F": 0.5}
    )


def oases(num_layers: int = 2, collective: float = 0.5) -> Miniature:
    """Oases: two sub-batches whose TP collectives hide under each other's compute."""
    names = [f"{kind}{i}" for i in range(num_layers) for kind in "am"]
    text = []
    for i, s in enumerate(names):
        for p in (0, 1):
            dep = f"ALL_REDUCE.{p}[{names[i - 1]}f]" if i else "none"
            text += [f"F.{p}[{s}]{{saves=inputs}} <- {dep}", f"ALL_REDUCE.{p}[{s}f] <- F.{p}[{s}]"]
    last = names[-1]
    for i, s in enumerate(reversed(names)):
        for p in (1, 0):
            dep = f"ALL_REDUCE.{p}[{last}f]" if i == 0 else f"ALL_REDUCE.{p}[{names[-i]}b]"
            text += [
                f"B.{p}[{s}]{{recompute=inner}} <- {dep}",
                f"ALL_REDUCE.{p}[{s}b] <- B.{p}[{s}]",
            ]
    text.append(f"OPT <- B.0[{names[0]}]")
    plan = Plan(
        name="oases",
        barrier=False,
        placement=Placement(cells=_cells(2), segments=_segments(1), microbatches=(1,)),
        programs=(ProgramText((0, 1), " ; ".join(text)),),
    )
    expected = {(2, 0.5): 33.0, (4, 1.0): 66.0, (4, 0.5): 65.0, (4, 2.0): 83.0}[
        num_layers, collective
    ]
    return Miniature(plan, {"F": 1, "B": 3, "ALL_REDUCE": collective, "OPT": 0.25}, expected)


def merak(*, transfer: float = 0.5, buffers: int = 2, plain: bool = False) -> Miniature:
    """Merak: F that saves inputs only, recomputation of its own on the critical path."""
    early = """
    0F0{saves=inputs} SEND_F0 0F1{saves=inputs} SEND_F1 0F2{saves=inputs} SEND_F2
    | 0R0 RECV_B0 0B0 | 0R1 RECV_B1 0B1 | 0F3{saves=inputs} SEND_F3
    | RECV_B2 0B2{recompute=inner} | 0R3 RECV_B3 0B3 | OPT
    """
    inner = """
    0F0{saves=inputs} SEND_F0 0F1{saves=inputs} SEND_F1 RECV_B0 0B0{recompute=inner}
    0F2{saves=inputs} SEND_F2 RECV_B1 0B1{recompute=inner} 0F3{saves=inputs} SEND_F3
    RECV_B2 0B2{recompute=inner} RECV_B3 0B3{recompute=inner} OPT
    """
    second = "RECV_F{i} 1F{i} 1B{i} SEND_B{i}"
    if plain:
        second = "RECV_F{i} 1F{i}{{saves=inputs}} 1B{i}{{recompute=inner}} SEND_B{i}"
    plan = Plan(
        name="merak",
        barrier=False,
        buffers=buffers,
        placement=Placement(
            cells=_cells(1, 1), segments=_segments(2), boundaries=_chain(2), microbatches=(4,)
        ),
        programs=(
            ProgramText((0,), inner if plain else early),
            ProgramText((1,), " | ".join(second.format(i=i) for i in range(4)) + " | OPT"),
        ),
    )
    seconds = {
        "F": 1,
        "R": 1,
        "B": 2,
        "SEND_F": transfer,
        "SEND_B": transfer,
        "OPT": 0.25,
        "0B2": 3,
    }
    if plain:
        seconds |= {"B": 3}
    expected = {
        (0.5, 2, False): 17.25,
        (0.5, 0, False): 18.75,
        (0.0, 2, False): 16.25,
        (0.5, 2, True): 22.25,
        (0.0, 2, True): 20.25,
    }[transfer, buffers, plain]
    return Miniature(plan, seconds, expected)


def embrace(*, scheduled: bool = True) -> Miniature:
    """EmbRace: prior and delayed parts of a sparse gradient, the delayed one in the next step."""
    body = """
    repeat(steps){
      LOOKUP <- OPT[p]@1, OPT[d]@2 ; ^1 OPT[a] <- ^1 ALL_REDUCE[dense] ; ALL_TO_ALL[f] <- LOOKUP
      ; ^1 ALL_TO_ALL[delayed] <- ^1 B ; F <- ALL_TO_ALL[f], ^1 OPT[a]
      ; ^1 OPT[d] <- ^1 ALL_TO_ALL[delayed]
      ; B <- F ; ALL_TO_ALL[prior] <- B ; ALL_REDUCE[dense]:ep <- B ; OPT[p] <- ALL_TO_ALL[prior]
    }
    once{ OPT[a] <- ALL_REDUCE[dense] ; ALL_TO_ALL[delayed] <- B ; OPT[d] <- ALL_TO_ALL[delayed] }
    """
    plain = """
    repeat(steps){
      LOOKUP <- OPT[p]@1 ; ALL_TO_ALL[f] <- LOOKUP ; F <- ALL_TO_ALL[f], OPT[a]@1
      ; B <- F ; ALL_REDUCE[dense]:ep <- B ; ALL_TO_ALL[whole] <- B
      ; OPT[a] <- ALL_REDUCE[dense] ; OPT[p] <- ALL_TO_ALL[whole]
    }
    """
    cells = tuple(Cell(stage=0, replica=r, ranks=(r,)) for r in (0, 1))
    plan = Plan(
        name="embrace",
        barrier=False,
        placement=Placement(cells=cells, segments=_segments(1), microbatches=(1, 1), ep=2),
        programs=(ProgramText((0, 1), body if scheduled else plain),),
    )
    seconds = {
        "LOOKUP": 0.25,
        "ALL_TO_ALL[f]": 0.5,
        "F": 1,
        "B": 2,
        "ALL_TO_ALL[prior]": 0.5,
        "ALL_TO_ALL[delayed]": 0.5,
        "ALL_TO_ALL[whole]": 1.0,
        "ALL_REDUCE": 1,
        "OPT": 0.25,
    }
    if not scheduled:
        seconds["OPT[p]"] = 0.5
    return Miniature(plan, seconds, 11.25 if scheduled else 12.5, steps=2)


def fusionllm(*, coded: bool = True, buffers: int = 2) -> Miniature:
    """FusionLLM: a DAG over sites, sums over consumers, a codec on the slow link."""
    enc = "0ENCODE{i}[uw] " if coded else ""
    dec = "0DECODE{i}[uw] " if coded else ""
    u = " ".join(f"0F{i} 0SEND_F{i}[uv] " + enc.format(i=i) + f"0SEND_F{i}[uw]" for i in (0, 1))
    u += (
        " | "
        + " | ".join(f"0RECV_B{i}[uv] 0RECV_B{i}[uw] " + dec.format(i=i) + f"0B{i}" for i in (0, 1))
        + " | OPT"
    )
    v = (
        "RECV_F0[uv] 1F0 SEND_F0[vw] RECV_F1[uv] 1F1 SEND_F1[vw]"
        " | RECV_B0[vw] 1B0 SEND_B0[uv] RECV_B1[vw] 1B1 SEND_B1[uv] | OPT"
    )
    wd, we = ("2DECODE{i}[uw] ", "2ENCODE{i}[uw] ") if coded else ("", "")
    w = (
        " | ".join(
            f"2RECV_F{i}[uw] "
            + wd.format(i=i)
            + f"2RECV_F{i}[vw] 2F{i} 2B{i} 2SEND_B{i}[vw] "
            + we.format(i=i)
            + f"2SEND_B{i}[uw]"
            + (f" <- 2ENCODE{i}[uw]" if coded else "")
            for i in (0, 1)
        )
        + " | OPT"
    )
    plan = Plan(
        name="fusionllm",
        exact=not coded,
        reason="compressed activations" if coded else "",
        barrier=False,
        buffers=buffers,
        placement=Placement(
            cells=_cells(1, 1, 1),
            segments=_segments(3),
            microbatches=(2,),
            boundaries=(
                Boundary(name="uv", src=0, dst=1),
                Boundary(name="vw", src=1, dst=2),
                Boundary(name="uw", src=0, dst=2),
            ),
        ),
        programs=(ProgramText((0,), u), ProgramText((1,), v), ProgramText((2,), w)),
    )
    slow = 1.0 if coded else 4.0
    seconds = {
        "F": 1,
        "B": 2,
        "SEND_F": 0.5,
        "SEND_B": 0.5,
        "SEND_F[uw]": slow,
        "SEND_B[uw]": slow,
        "ENCODE": 0.25,
        "DECODE": 0.25,
        "OPT": 0.25,
    }
    return Miniature(plan, seconds, 14.75 if coded else 18.25)


def autohete(*, priority: bool = True, barrier: bool = False) -> Miniature:
    """AutoHete: host streams served by priority, the next step's blocks start as they arrive."""

    def key(i: int) -> str:
        return f"{{priority={i}}}" if priority else ""

    text = [f"F[{i}] <- H2D[{i}]@1" + (f", F[{i - 1}]" if i else "") for i in range(3)]
    for i in (2, 1, 0):
        host = f"{{stream=host, priority={i}}}" if priority else "{stream=host}"
        text += [
            f"B[{i}] <- " + ("F[2]" if i == 2 else f"B[{i + 1}]"),
            f"REDUCE_GRAD[{i}] <- B[{i}]",
            f"D2H[{i}]{key(i)} <- REDUCE_GRAD[{i}]",
            f"OPT[{i}]{host} <- D2H[{i}]",
            f"H2D[{i}]{key(i)} <- OPT[{i}]",
        ]
    if barrier:
        text.append("BARRIER")
    cells = tuple(Cell(stage=0, replica=r, ranks=(r,)) for r in (0, 1))
    plan = Plan(
        name="autohete",
        barrier=barrier,
        placement=Placement(cells=cells, segments=_segments(1), microbatches=(1, 1)),
        programs=(ProgramText((0, 1), " ; ".join(text)),),
    )
    seconds = {"F": 1, "B": 2, "REDUCE_GRAD": 0.25, "D2H": 0.5, "OPT": 4.5, "H2D": 0.5}
    return Miniature(plan, seconds, 38.5 if priority and not barrier else 39.5, steps=2)


ALL = {
    "h2": h2,
    "pro-prophet": pro_prophet,
    "async": async_sgd,
    "oases": oases,
    "merak": merak,
    "embrace": embrace,
    "fusionllm": fusionllm,
    "autohete": autohete,
}
