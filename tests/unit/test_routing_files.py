"""Readers of routing: round trips, public traces' forms, and files that are refused."""

from __future__ import annotations

import bz2
import io
import json
import lzma
import zipfile
import zlib
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sim.errors import InputError
from strategies.expert.routing import Routing, statistics
from strategies.expert.routing_files import load_routing, save_routing
from strategies.expert.routing_input import LARGEST, MOST

COUNTS = np.random.default_rng(1).integers(0, 99, (3, 2, 4, 2))


def written(tmp_path, name, text):
    file = tmp_path / name
    file.write_text(text)
    return file


def test_npz_round_trip(tmp_path):
    file = tmp_path / "run.npz"
    save_routing(file, Routing(COUNTS))
    save_routing(file, Routing(COUNTS + 1))
    assert (load_routing(file).counts == COUNTS + 1).all()
    assert [p.name for p in tmp_path.iterdir()] == ["run.npz"]
    with pytest.raises(InputError, match="written as npz"):
        save_routing(tmp_path / "run.csv", Routing(COUNTS))
    with pytest.raises(InputError, match="cannot write"):
        save_routing(tmp_path / "no" / "run.npz", Routing(COUNTS))


def test_csv_with_and_without_sources(tmp_path):
    lines = ["Step, Layer,EXPERT ,source,Count"]
    lines += [f"{10 + t},{2 + at},{e},{s},{n}" for (t, at, e, s), n in np.ndenumerate(COUNTS)]
    found = load_routing(written(tmp_path, "a.csv", "\n".join(lines) + "\n\n"))
    assert (found.counts == COUNTS).all() and "a.csv" in found.origin
    bare = "iter,layer,expert,tokens\n0,0,2,7\n1,0,0,3\n"
    found = load_routing(written(tmp_path, "b.csv", bare), experts=5)
    assert found.counts.shape == (2, 1, 5, 1)
    assert found.counts[0, 0, 2, 0] == 7 and found.counts.sum() == 10


@pytest.mark.parametrize(
    ("text", "message", "line"),
    [
        ("", "column step", 1),
        ("step,layer,count\n1,1,1\n", "column expert", 1),
        ("step,layer,expert,count\n", "no routing", 0),
        ("step,layer,expert,count\n0,0,0,1\n0,0,1,x\n", "whole numbers", 3),
        ("step,layer,expert,count\n0,0,0,-1\n", "whole numbers", 2),
        ("step,layer,expert,count\n0,0,0,99999999999999999999\n", "whole numbers", 2),
        (f"step,layer,expert,count\n0,0,0,{'9' * 5000}\n", "found 9{40} ... 5000 characters", 2),
        ("step,layer,expert,count\n0,0,0\n", "number of cells", 2),
        ("step,layer,expert,count\n0,0,0,1\n\n0,0,0,2\n", "already given", 4),
        ("step,layer,expert,count\n0,0,9,1\n", "does not have", 0),
        ("step,layer,expert,source,count\n0,0,0,5,1\n1,0,0,5,\x00\n", "whole numbers", 3),
    ],
)
def test_csv_refused(tmp_path, text, message, line):
    file = written(tmp_path, "a.csv", text)
    with pytest.raises(InputError, match=message) as error:
        load_routing(file, experts=4)
    assert error.value.file == str(file) and error.value.line == line


def test_no_array_that_no_run_has(tmp_path):
    file = written(tmp_path, "a.csv", f"step,layer,expert,count\n0,0,{MOST - 1},1\n1,0,0,1\n")
    with pytest.raises(InputError, match="routes this much"):
        load_routing(file)
    huge = np.lib.stride_tricks.as_strided(np.zeros(1, np.int8), (MOST, 4, 1), (0, 0, 0))
    with (tmp_path / "ids.npy").open("wb") as out:
        np.lib.format.write_array_header_1_0(out, np.lib.format.header_data_from_array_1_0(huge))
    with pytest.raises(InputError, match="routes this much"):
        load_routing(tmp_path / "ids.npy")


def laer(tokens):
    head = "rank,method,model_name,layer,iter,token_num\n"
    rows = [
        f"{rank},{method},e8k2,{layer},{t},{n * (1 + (method == 'FLEX'))}"
        for method in ("FSDP", "FLEX")
        for (rank, layer, t), n in np.ndenumerate(tokens)
    ]
    return head + "\n".join(rows)


def test_laer_shards(tmp_path):
    tokens = np.random.default_rng(2).integers(50, 99, (8, 2, 3))
    file = written(tmp_path, "trace.csv", laer(tokens))
    found = load_routing(file, experts=8, devices=4, method="FSDP")
    assert found.counts.shape == (3, 2, 8, 2)
    loads = found.counts.reshape(3, 2, 4, 2, 2)
    assert (loads.max(axis=3) - loads.min(axis=3)).max() <= 1
    shards = tokens.reshape(2, 4, 2, 3).transpose(3, 2, 1, 0)
    assert (loads.sum(axis=3) == shards).all()
    assert "spread evenly" in found.origin
    fullest = shards.max(axis=(2, 3)) / shards.mean(axis=(2, 3))
    assert statistics(found, 4).group_load.mean == pytest.approx(fullest.mean())
    with pytest.raises(InputError, match="several runs"):
        load_routing(file, experts=8)
    with pytest.raises(InputError, match="how many experts"):
        load_routing(file, method="FSDP")
    with pytest.raises(InputError, match="no routing"):
        load_routing(file, experts=8, method="none")


def record(step, layer, ids, **more):
    return json.dumps({"step": step, "layer": layer, "topk": 2, "top_indices": ids, **more})


def test_router_trace_of_ranks(tmp_path):
    folder = tmp_path / "trace"
    folder.mkdir()
    for rank in (0, 2, 10):
        lines = [
            record(5, 3, [[0, 1], [1, 2]], rank=rank, stage="pre_dispatch"),
            record(5, 3, [[3, 1]], rank=rank),
            record(6, 3, [[rank % 4, 3]], rank=rank),
            record(5, 3, [[9, 9]], mtp_idx=0),
        ]
        written(folder, f"router_trace_rank{rank}.jsonl", "\n".join(lines) + "\n")
    found = load_routing(folder).counts
    assert found.shape == (2, 1, 4, 3)
    assert found[0, 0].tolist() == [[1] * 3, [3] * 3, [1] * 3, [1] * 3]
    assert found[1, 0, 2].tolist() == [0, 1, 1]  # ranks 0, 2, 10 in the order of numbers
    one = load_routing(folder / "router_trace_rank2.jsonl", experts=6).counts
    assert one.shape == (2, 1, 6, 1) and (one[..., :4, 0] == found[..., 1]).all()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "no record"),
        (record(-1, 0, [[0]]), "no record"),
        (record(0, 0, [["a"]]), "no record"),
        (record(0, 0, [[2**70]]), "no record"),
        ('{"step": 0, "layer": 1}', "no record"),
        (record(0, 0, [[7]]), "does not have"),
    ],
)
def test_router_trace_refused(tmp_path, line, message):
    file = written(tmp_path, "t.jsonl", record(0, 0, [[1, 0]]) + "\n" + line + "\n")
    with pytest.raises(InputError, match=message) as error:
        load_routing(file, experts=4)
    assert error.value.line == 2
    with pytest.raises(InputError, match=r"no \.jsonl"):
        (tmp_path / "empty").mkdir()
        load_routing(tmp_path / "empty")


def test_ids_of_tokens(tmp_path):
    ids = np.random.default_rng(3).integers(0, 5, (24, 3, 2)).astype(np.int16)
    np.save(tmp_path / "ids.npy", ids)
    found = load_routing(tmp_path / "ids.npy", experts=6, steps=2, sources=3).counts
    assert found.shape == (2, 3, 6, 3)
    part = ids.reshape(2, 3, 4, 3, 2)
    for t, layer, e, s in np.ndindex(*found.shape):
        assert found[t, layer, e, s] == (part[t, s, :, layer] == e).sum()
    with pytest.raises(InputError, match="equal parts"):
        load_routing(tmp_path / "ids.npy", steps=5)
    with pytest.raises(InputError, match="does not have"):
        load_routing(tmp_path / "ids.npy", experts=3)
    np.save(tmp_path / "ids.npy", -ids - 1)
    with pytest.raises(InputError, match="does not have"):
        load_routing(tmp_path / "ids.npy")


def test_arrays_refused(tmp_path):
    file = tmp_path / "a.npy"
    np.save(file, np.zeros((2, 2, 2)))
    with pytest.raises(InputError, match="whole numbers"):
        load_routing(file)
    np.save(file, np.array([[[{}]]]), allow_pickle=True)
    with pytest.raises(InputError, match="whole numbers"):
        load_routing(file)
    file.write_bytes(b"\x93NUMPY")
    with pytest.raises(InputError, match="no npy"):
        load_routing(file)
    file = tmp_path / "a.npz"
    np.savez(file, counts=np.zeros((2, 2, 2), int))
    with pytest.raises(InputError, match="whole numbers"):
        load_routing(file)
    np.savez(file, other=COUNTS)
    with pytest.raises(InputError, match="no npz"):
        load_routing(file)
    save_routing(file, Routing(COUNTS))
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(InputError, match="no npz"):
        load_routing(file)
    for name in ("a.txt", "none.csv"):
        with pytest.raises(InputError, match=r"no known form|cannot read"):
            load_routing(tmp_path / name)
    (tmp_path / "b.csv").write_bytes(b"step,layer,expert,count\n\xff\n")
    with pytest.raises(InputError, match="cannot read"):
        load_routing(tmp_path / "b.csv")


def npy(counts):
    out = io.BytesIO()
    np.save(out, counts)
    return out.getvalue()


def packed(method, data):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        archive.writestr("counts.npy", data)
    return out.getvalue()


def test_the_array_that_is_read_is_the_one_whose_shape_was_looked_at(tmp_path):
    """A second member that numpy takes for the same name, and would read in its place."""
    huge = io.BytesIO()
    head = {"descr": "<i8", "fortran_order": False, "shape": (10**13, 1, 1, 1)}
    np.lib.format.write_array_header_1_0(huge, head)
    file = tmp_path / "a.npz"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("counts.npy", npy(COUNTS))
        archive.writestr("counts", huge.getvalue())
    assert (load_routing(file).counts == COUNTS).all()
    file.write_bytes(packed(zipfile.ZIP_STORED, huge.getvalue()))
    with pytest.raises(InputError, match="routes this much"):
        load_routing(file)
    long = b"\x93NUMPY\x02\x00" + (2**26).to_bytes(4, "little") + b" " * 2**26
    file.write_bytes(packed(zipfile.ZIP_DEFLATED, long))
    with pytest.raises(InputError, match="no npz"):
        load_routing(file)


def test_broken_members_of_every_packing_are_the_files_fault(tmp_path):
    file, whole = tmp_path / "a.npz", npy(COUNTS)
    streams = {
        zipfile.ZIP_DEFLATED: zlib.compress(whole, wbits=-15),
        zipfile.ZIP_BZIP2: bz2.compress(whole),
        zipfile.ZIP_LZMA: lzma.compress(whole),
    }
    for method in streams:
        good = packed(method, whole)
        file.write_bytes(good)
        assert (load_routing(file).counts == COUNTS).all()
        start = 30 + len("counts.npy")
        file.write_bytes(good[:start] + b"\xff" * 40 + good[start + 40 :])
        with pytest.raises(InputError, match=r"no npz|cannot read"):
            load_routing(file)
    central = good.rindex(b"PK\x01\x02")
    for at, value in ((8, 1), (10, 99)):  # encrypted; a packing that nobody knows
        data = bytearray(good)
        for place in (central + at, at - 2):
            data[place] = value
        file.write_bytes(data)
        with pytest.raises(InputError, match=r"encrypted|not supported"):
            load_routing(file)


def test_counts_that_cannot_be_added_exactly_are_refused(tmp_path):
    file = tmp_path / "a.npz"
    for counts in (np.full((1, 1, 2, 2), 2**64 - 1, np.uint64), np.full((1, 1, 2, 2), 2**51)):
        np.savez(file, counts=counts)
        with pytest.raises(InputError, match="sends this many tokens"):
            load_routing(file)
    counts = np.full((1, 1, 2, 2), 2**51)
    counts[0, 0, 0, 0] -= 1
    assert Routing(counts).counts.sum() == LARGEST - 1


@cache
def good_files():
    """A small file of every form."""
    rows = "\n".join(f"{t},{at},{e},{s},{n}" for (t, at, e, s), n in np.ndenumerate(COUNTS))
    ids = npy(np.random.default_rng(3).integers(0, 5, (6, 3, 2)).astype(np.int16))
    lines = "\n".join(record(t, 0, [[0, 1], [2, 1]], rank=t) for t in range(3))
    return {
        "a.csv": f"step,layer,expert,source,count\n{rows}\n".encode(),
        "laer.csv": laer(np.arange(8).reshape(4, 1, 2)).encode(),
        "a.jsonl": lines.encode(),
        "a.npy": ids,
        "stored.npz": packed(zipfile.ZIP_STORED, npy(COUNTS)),
        "deflated.npz": packed(zipfile.ZIP_DEFLATED, npy(COUNTS)),
        "bzip2.npz": packed(zipfile.ZIP_BZIP2, npy(COUNTS)),
        "lzma.npz": packed(zipfile.ZIP_LZMA, npy(COUNTS)),
    }


edits = st.lists(
    st.tuples(st.floats(0, 1), st.sampled_from("rid"), st.binary(min_size=1, max_size=6)),
    min_size=1,
    max_size=4,
)


@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.sampled_from(sorted(good_files())), edits)
@example("a.csv", [(0.99, "i", b"9" * 5000)])
@example("a.jsonl", [(0.01, "i", b'"a": ' + b"[" * 100_000)])
def test_small_changes_of_good_files_are_read_or_refused(tmp_path, name, changes):
    data = good_files()[name]
    for place, what, new in changes:
        at = int(place * len(data))
        rest = data[at:] if what == "i" else data[at + len(new) :]
        data = data[:at] + (b"" if what == "d" else new) + rest
    file = Path(tmp_path, name)
    file.write_bytes(data)
    try:
        found = load_routing(file, experts=8, method="FSDP")
    except InputError:
        return
    assert found.counts.min() >= 0 and found.counts.sum(dtype=float) < LARGEST
