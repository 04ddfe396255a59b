"""Output of other tools: own samples in their formats give profiles that give the times back.

The samples are written by hand, with invented numbers; which versions: see the readers.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sim.cost.collective import collective_cost
from sim.errors import InputError
from sim.hardware.catalog import Catalog
from sim.hardware.machine import Machine
from sim.hardware.route import path, transfer_time
from sim.interop.kineto import kineto_transfers, read_kineto, seconds_by_kind
from sim.interop.link_records import (
    Transfer,
    alone_curve,
    limited,
    link_document,
    member_transfer,
    unpacked,
)
from sim.interop.nccl_tests import nccl_transfers, read_nccl
from sim.interop.nvidia_topo import node_document, read_topology
from sim.interop.perftest import read_perftest
from sim.problem import load_problem
from sim.root_command import build_app

DATA = Path(__file__).parents[1] / "data" / "links"


def sample(name: str) -> str:
    return (DATA / name).read_text()


def machine_of(link: dict[str, Any], chips: int = 8) -> Machine:
    accelerator = {
        "name": "X", "memory": "16 GiB", "memory_bandwidth": "1 TB/s",
        "peaks": {"fp32": "10 TFLOP/s"},
    }  # fmt: skip
    cluster = {
        "name": "one",
        "profiles": {"accelerators": [accelerator], "links": [link]},
        "sites": [
            {"name": "a", "nodes": [{"accelerator": "X", "chips": chips, "fabric": link["name"]}]}
        ],
    }
    return load_problem(cluster, "llama_tiny", "two_processes").machine


@pytest.mark.parametrize(
    ("file", "kind"),
    [("nccl_all_reduce.txt", "all_reduce"), ("nccl_all_gather.json", "all_gather")],
)
def test_a_profile_from_nccl_tests_gives_every_time_back(file: str, kind: str) -> None:
    rows = read_nccl(sample(file))
    assert {(r.collective, r.ranks) for r in rows} == {(kind, 8)}
    link = link_document("l", nccl_transfers(rows), "sample", kind="fabric")
    machine = machine_of(link)
    for r in rows[1:]:
        cost = collective_cost(machine, kind, range(8), r.nbytes, algorithm="ring")
        assert cost.seconds == pytest.approx(r.seconds, rel=1e-6)
    empty = collective_cost(machine, kind, range(8), 1e-3, algorithm="ring")
    assert empty.seconds == pytest.approx(rows[0].seconds, rel=1e-3)


def test_columns_of_an_old_table_are_found_by_name() -> None:
    text = (
        "# nThread: 1 nGpus: 2\n#   Rank  0 Pid 1 on h device 0\n#   Rank  1 Pid 1 on h device 1\n"
        "#       size         count    type     time  algbw  busbw  error\n"
        "     1048576        262144   float    100.0  10.49  10.49  0e+00\n"
    )
    (row,) = read_nccl(text, "all_reduce")
    assert (row.ranks, row.nbytes, row.busbw) == (2, 1048576, 10.49e9)
    assert nccl_transfers([row]) == (Transfer(nbytes=524288, seconds=pytest.approx(5e-5)),)


def test_ring_rounds_by_hand() -> None:
    assert member_transfer("all_reduce", 4, 400.0, 6.0) == Transfer(nbytes=100.0, seconds=1.0)
    assert member_transfer("all_gather", 4, 400.0, 6.0) == Transfer(nbytes=100.0, seconds=2.0)
    assert member_transfer("sendrecv", 4, 400.0, 6.0) == Transfer(nbytes=400.0, seconds=6.0)


def test_perftest_rates_and_latencies_make_one_link() -> None:
    rates, times = (
        read_perftest(sample("ib_write_bw.txt")),
        read_perftest(sample("ib_send_lat.txt")),
    )
    assert [t.rate for t in rates] == pytest.approx([5e9, 22.5e9, 24.75e9])
    assert [t.seconds for t in times] == pytest.approx([1.24e-6, 2.2e-6])
    machine = machine_of(link_document("l", (*rates, *times), "sample"), chips=2)
    route = path(machine, 0, 1)
    assert route.latency == pytest.approx(1.24e-6)
    for t in rates:
        assert transfer_time(route, t.nbytes) - route.latency == pytest.approx(t.nbytes / t.rate)
    mebi = sample("ib_write_bw.txt").replace("Gb/sec", "MiB/sec")
    assert read_perftest(mebi)[0].rate == 40.0 * 2**20


def test_a_perftest_json_needs_its_unit() -> None:
    text = sample("ib_write_bw.json")
    assert read_perftest(text, "Gb") == (Transfer(nbytes=65536, rate=22.5e9),)
    with pytest.raises(
        InputError, match="have no unit; found none given; expected Gb or MB or MiB"
    ):
        read_perftest(text)
    latency = json.dumps({"results": [{"MsgSize": 2, "t_typical": 1.5}]})
    assert read_perftest(latency) == (Transfer(nbytes=2, seconds=1.5e-6),)


def test_a_matrix_gives_kinds_and_the_nearest_nic() -> None:
    found = read_topology(sample("topo_4_chips.txt"))
    assert found.chips == 4 and found.nics == ("NIC0", "NIC1")
    assert found.kind(2, 0) == "fabric" and found.kind(0, 3) == "pcie"
    assert found.affinity() == (0, 0, 1, 1)
    document = node_document("n", found, "T4", "nvlink3", "ib_hdr_200g", "sample")
    assert document["notes"] == [
        "NV12 between chips 0-1 0-2 1-2", "SYS between chips 0-3 1-3 2-3",
    ]  # fmt: skip
    with pytest.raises(InputError, match="a matrix has no rates"):
        node_document("n", found, "T4", "", "ib_hdr_200g", "sample")


def test_equally_near_nics_are_shared_out() -> None:
    lines = ["\tGPU0\tGPU1\tNIC0\tNIC1"]
    lines += ["GPU0\tX\tNV4\tNODE\tNODE", "GPU1\tNV4\tX\tNODE\tNODE"]
    assert read_topology("\n".join(lines)).affinity() == (0, 1)


def test_kernels_of_a_trace_by_kind() -> None:
    kernels = read_kineto(sample("kineto.json"))
    by_kind = seconds_by_kind(kernels)
    assert {k: n for k, (_, n) in by_kind.items()} == {
        "collective": 3, "gemm": 1, "attention": 1, "copy": 1, "elementwise": 1,
    }  # fmt: skip
    assert by_kind["gemm"][0] == pytest.approx(40e-6)
    assert next(iter(by_kind)) == "collective"
    # Two all-reduces of 16 KiB: the one that waited less counts. Two ranks: two rounds of halves.
    small, large = kineto_transfers(kernels)
    assert small == Transfer(nbytes=8192, seconds=pytest.approx(50e-6))
    assert large == Transfer(nbytes=2097152, seconds=pytest.approx(550e-6))
    packed = gzip.compress(sample("kineto.json").encode())
    assert read_kineto(unpacked(packed)) == kernels


HEAD = "# size count type redop root time algbw busbw #wrong\n"
TOPO = "\tGPU0\tGPU1\n"


@pytest.mark.parametrize(
    ("read", "text", "words"),
    [
        (read_nccl, "  8 2 float sum -1 28.0 0 0 0\n", r"^1: a row before the heading"),
        (read_nccl, HEAD + "8 2 float sum -1 fast 0 0 0\n", r"^2: no number for time; found fast"),
        (read_nccl, HEAD + "8 2 float sum -1 28.0\n", r"^2: no number for #wrong"),
        (read_nccl, HEAD + "8 2 float sum -1 28.0 0 0 3\n", r"^2: the test computed wrong results"),
        (read_nccl, "nothing here\n", "no row of nccl-tests"),
        (read_nccl, "", "is empty"),
        (read_nccl, '{"results": [\n}', r"^2: no JSON of nccl-tests"),
        (read_nccl, '{"results": 3}', "results: no results"),
        (read_nccl, '{"results": [{"size": 8}]}', r"results.0: neither out_of_place nor in_place"),
        (
            read_nccl,
            '{"results": [{"size": 8, "in_place": {"time": null}}]}',
            r"results.0.in_place.time: not a number; found None",
        ),
        (read_perftest, "2048 5000 41.00 40.00 2.4\n", r"^1: a row before the heading"),
        (read_perftest, "#bytes #iterations BW average[kB/sec]\n", r"^1: a heading of an unknown"),
        (read_perftest, "#bytes t_typical[usec]\n2 1000 1.0\n", r"^2: a row that does not fit"),
        (read_perftest, '{"results": {"MsgSize": -1}}', r"results.MsgSize: not a positive number"),
        (read_perftest, '{"results": [3]}', "results: no results"),
        (read_perftest, "{test_info: {\n", r"^1: no JSON of perftest"),
        (read_topology, TOPO + "GPU0\tX\n", r"^2: a row that is too short"),
        (read_topology, TOPO + "GPU0\tX\tFAST\n", r"^2: an unknown code; found FAST"),
        (read_topology, TOPO + "GPU0\tX\tNV2\n", "GPU1: a chip without a row"),
        (
            read_topology,
            TOPO + "GPU0\tX\tNV2\nGPU1\tSYS\tX\n",
            "GPU0, GPU1: the matrix is not symmetric",
        ),
        (read_topology, "no such tool\n", "no matrix"),
        (read_kineto, '{"traceEvents": [\n{,', r"^2: no trace"),
        (read_kineto, '{"traceEvents": {}}', "traceEvents: no events"),
        (
            read_kineto,
            '[{"ph": "X", "cat": "kernel", "ts": 1, "dur": "long"}]',
            r"traceEvents.0.dur: no number; found 'long'",
        ),
    ],
)  # fmt: skip
def test_malformed_output_is_refused_with_its_place(read: Any, text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read(text)


def test_limits() -> None:
    with pytest.raises(InputError, match="too long; found 11 characters; expected at most 10"):
        limited("x" * 11, "it", 10)
    bomb = gzip.compress(b"0" * 1000)
    with pytest.raises(InputError, match="too long"):
        unpacked(bomb, limit=999)
    with pytest.raises(InputError, match="a broken gzip file"):
        unpacked(bomb[:-9])
    with pytest.raises(InputError, match="not UTF-8"):
        unpacked(b"\xff\xfe")


def test_collectives_that_say_nothing_of_a_link_are_refused() -> None:
    with pytest.raises(InputError, match=r"no link follows.*found alltoall; expected all_reduce"):
        member_transfer("alltoall", 8, 1e6, 1.0)
    with pytest.raises(InputError, match="one rank"):
        member_transfer("all_reduce", 1, 1e6, 1.0)
    with pytest.raises(InputError, match="no collective with its size"):
        kineto_transfers(read_kineto("[]"))
    with pytest.raises(InputError, match="too few sizes"):
        link_document("l", [Transfer(nbytes=8, seconds=1e-6)], "sample")


def run(*args: str) -> tuple[int, str]:
    done = CliRunner().invoke(build_app(), ["import-links", *args])
    return done.exit_code, str(done.exception or done.output)


def test_the_command_writes_profiles_that_a_catalogue_reads(tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    (tmp_path / "nodes").mkdir()
    link, node = tmp_path / "links" / "rail.yaml", tmp_path / "nodes" / "quad.yaml"
    files = [str(DATA / "ib_write_bw.txt"), str(DATA / "ib_send_lat.txt")]
    code, said = run(*files, "--format", "perftest", "-o", str(link))
    assert code == 0, said
    assert "rate 24.75 GB/s" in said and "latency 0.62 us a port" in said
    args = ("--accelerator", "T4", "--fabric", "rail", "--nic", "rail")
    topo = str(DATA / "topo_4_chips.txt")
    code, said = run(topo, "--format", "topo", *args, "-o", str(node), "--json")
    assert code == 0 and json.loads(said)["chips"] == 4
    catalog = Catalog([tmp_path])
    assert catalog.link("rail").rate.value == 24.75e9
    cluster = {"name": "c", "sites": [{"name": "s", "nodes": [{"profile": "quad"}]}]}
    machine = load_problem(cluster, "llama_tiny", "two_processes", catalog=catalog).machine
    assert machine.num_chips == 4 and machine.nodes[0].chip_nic == (0, 0, 1, 1)


def test_the_command_names_what_is_wrong(tmp_path: Path) -> None:
    out = str(tmp_path / "l.yaml")
    bad = tmp_path / "bad.txt"
    bad.write_text(HEAD + "8 2 float sum -1 x 0 0 0\n")
    assert "bad.txt:2: no number for time" in run(str(bad), "--format", "nccl-tests", "-o", out)[1]
    assert "expected one of" in run(str(bad), "--format", "iperf", "-o", out)[1]
    assert "ends in .yaml" in run(str(bad), "--format", "topo", "-o", str(tmp_path / "l.txt"))[1]
    assert "--accelerator" in run(str(bad), "--format", "topo", "-o", out)[1]
    assert "cannot read it" in run("nowhere", "--format", "perftest", "-o", out)[1]
    assert list(tmp_path.glob("*.yaml")) == []


def test_a_disturbed_message_counts_as_a_longer_one_that_was_faster() -> None:
    latency, rate, points = alone_curve([8.0, 1e6, 2e6, 4e6], [1e-3, 9e-3, 3e-3, 5e-3])
    assert latency == 1e-3
    assert [size / (rate * share) for size, share in points] == pytest.approx([2e-3, 2e-3, 4e-3])
