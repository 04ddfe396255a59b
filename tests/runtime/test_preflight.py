"""Pre-flight checks: what must be equal, what must be there, and who is told."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from real_runtime import preflight as checks
from real_runtime.errors import RunError
from real_runtime.preflight import (
    Fault,
    RankFacts,
    Verdict,
    compare,
    digest_of_data,
    exchange,
    predicted_memory,
)

torch = pytest.importorskip("torch", reason="the runtime needs PyTorch")
sys.path.insert(0, str(Path(__file__).parent))
import plans  # noqa: E402


def facts(rank: int, **changes: Any) -> RankFacts:
    found = RankFacts(
        rank=rank, host=f"host{rank}", python="3.12.1", torch="2.13.0+cu128", hetlab="0.1.0",
        device="cuda:0", build="cuda", backend="nccl", free_bytes=16e9, plan="p", data="d",
        round_trip_s=0.001,
    )  # fmt: skip
    return msgspec.structs.replace(found, **changes)


def test_equal_ranks_are_fine() -> None:
    assert compare([facts(0), facts(1), facts(2)], {0: 1e9, 1: 1e9, 2: 1e9}) == Verdict()


@pytest.mark.parametrize(
    ("changes", "words", "code"),
    [
        ({"hetlab": "0.2.0"}, "hetlab 0.2.0, but 0.1.0 on rank 0 on host0", 1),
        ({"torch": "2.12.1"}, "torch 2.12, but 2.13 on rank 0", 1),
        ({"build": "hip"}, "torch built for hip, but cuda on rank 0", 1),
        ({"backend": "gloo"}, "backend gloo, but nccl", 1),
        ({"missing": "torch 2.13 has no backend nccl"}, "has no backend nccl", 1),
        ({"plan": "q"}, "plan q, but p on rank 0", 4),
        ({"data": "e"}, "data e, but d on rank 0", 4),
        ({"unreadable": "data x: gone", "data": ""}, "data x: gone", 4),
        ({"offset_s": -2.0}, "its clock is 2.0 s behind rank 0's on host0", 1),
        ({"offset_s": 1.2}, "its clock is 1.2 s ahead of rank 0's", 1),
        ({"free_bytes": 2 * 2.0**30}, "2.00 GiB are free on cuda:0, the plan needs 3.00 GiB", 1),
    ],
)
def test_each_difference_is_one_fault_that_names_rank_and_host(
    changes: dict[str, Any], words: str, code: int
) -> None:
    verdict = compare([facts(0), facts(1, **changes)], {0: 3 * 2.0**30, 1: 3 * 2.0**30})
    (fault,) = verdict.faults
    assert fault.rank == 1 and fault.exit_code == code
    assert fault.text.startswith("on host1: ") and words in fault.text


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"python": "3.11.9"}, "python 3.11.9 on host1, 3.12.1 on host0"),
        ({"torch": "2.13.1+cu128"}, "torch 2.13.1+cu128 on host1, 2.13.0+cu128 on host0"),
    ],
)
def test_small_differences_are_named_and_pass(changes: dict[str, Any], note: str) -> None:
    assert compare([facts(0), facts(1, **changes)], {}) == Verdict((), (note,))


def test_a_slow_round_trip_accuses_no_clock() -> None:
    late = facts(1, offset_s=1.5, round_trip_s=1.2)
    assert compare([facts(0), late], {}) == Verdict()


def test_ranks_of_one_device_share_its_memory() -> None:
    both = [facts(r, host="h", device="cpu", free_bytes=10.0 * 2**30) for r in range(2)]
    assert compare(both, {0: 5.0 * 2**30, 1: 5.0 * 2**30}) == Verdict()
    verdict = compare(both, {0: 5.0 * 2**30, 1: 5.1 * 2**30})
    assert "10.10 GiB of 2 ranks" in verdict.faults[0].text
    unknown = [msgspec.structs.replace(f, free_bytes=0.0) for f in both]
    assert compare(unknown, {0: 1e15}) == Verdict()


def talk(size: int, clocks: dict[int, Any], judge: Any) -> dict[int, Any]:
    """Run the exchange of all ranks in threads over a store in memory."""
    from torch._C._distributed_c10d import HashStore

    store, found = HashStore(), dict[int, Any]()

    def one(rank: int) -> None:
        found[rank] = exchange(store, facts(rank), size, judge, clocks[rank])

    threads = [threading.Thread(target=one, args=(r,)) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


def test_all_ranks_hear_the_verdict_and_clocks_are_measured() -> None:
    import time

    skews, seen = {0: 0.0, 1: 7.5, 2: -3.25}, list[Any]()
    clocks = {r: (lambda s=s: time.time() + s) for r, s in skews.items()}

    def judge(all_facts: Any) -> Verdict:
        seen.extend(all_facts)
        return Verdict((Fault(2, "on host2: wrong", 4),), ("a note",))

    found = talk(3, clocks, judge)
    assert [f.rank for f in seen] == [0, 1, 2]
    assert len(found) == 3 and len({msgspec.json.encode(v) for v in found.values()}) == 1
    for f in seen[1:]:
        # The true offset lies within half a round trip of the measured one.
        assert abs(f.offset_s - skews[f.rank]) <= f.round_trip_s / 2 + 1e-6
    assert {f.rank for f in compare(seen, {}).faults} == {1, 2}


def test_a_rank_that_does_not_answer_is_named() -> None:
    from datetime import timedelta

    from torch._C._distributed_c10d import HashStore

    store = HashStore()
    store.set_timeout(timedelta(milliseconds=50))
    with pytest.raises(RunError, match="rank 1 did not answer before training"):
        exchange(store, facts(0), 2, lambda _: Verdict(), lambda: 0.0)


def test_a_rank_alone_checks_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._C._distributed_c10d import HashStore

    from real_runtime import preflight_rank
    from real_runtime.settings import RunSettings

    plan, device = plans.plan_of(plans.problem_of(), [[1]]), torch.device("cpu")
    settings = RunSettings(plan="", data=str(plans.write_tokens(tmp_path)), out="", steps=1)

    def check(given: RunSettings) -> Any:
        return preflight_rank.preflight(HashStore(), plan, given, 0, 1, device)

    assert check(settings) == Verdict()
    gone = msgspec.structs.replace(settings, data=str(tmp_path / "gone"))
    with pytest.raises(checks.PreflightError, match=r"on .*gone: No such file") as error:
        check(gone)
    assert (error.value.exit_code, error.value.rank) == (4, 0)
    monkeypatch.setattr(preflight_rank, "predicted_memory", lambda *_: {0: 1e18})
    with pytest.raises(checks.PreflightError, match="are free on cpu, the plan needs") as error:
        check(settings)
    assert error.value.exit_code == 1
    monkeypatch.setattr(preflight_rank.dist, "is_backend_available", lambda _: False)
    with pytest.raises(checks.PreflightError, match="has no backend gloo for cpu"):
        check(settings)


def test_data_are_hashed_whole_or_by_their_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "WHOLE", 100)
    monkeypatch.setattr(checks, "ENDS", 10)
    file = tmp_path / "data"

    def digest(content: bytes) -> str:
        file.write_bytes(content)
        return digest_of_data(file)

    def changed(content: bytes, at: int) -> bytes:
        return content[:at] + b"x" + content[at + 1 :]

    small, large = bytes(100), bytes(101)
    assert digest(small) == digest(small) != digest(bytes(99))
    assert all(digest(changed(small, at)) != digest(small) for at in (0, 50, 99))
    for at, differs in ((0, True), (9, True), (50, False), (91, True), (100, True)):
        assert (digest(changed(large, at)) != digest(large)) is differs
    assert digest(large).endswith("(101 B)")
    file.unlink()
    with pytest.raises(checks.PreflightError, match="No such file") as error:
        digest_of_data(file)
    assert error.value.exit_code == 4


def test_the_prediction_is_the_ledgers_without_the_context() -> None:
    from sim.cost.ledger import peak_memory

    problem = plans.problem_of()
    plan = plans.plan_of(problem, [[2], [1]])
    found = predicted_memory(plan, problem)
    assert sorted(found) == [0, 1, 2] and found[0] == found[1] != found[2]
    whole = peak_memory(plan, problem)[0, 0]
    assert found[0] == pytest.approx(whole.peak_bytes - whole.terms["context"])
    written = msgspec.structs.replace(plan, lowering=())
    assert predicted_memory(written, problem) == {}
