"""Measured runs: reading, selecting, settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.errors import InputError, UsageError
from sim.fidelity.runs import MeasuredRun, read_runs
from sim.fidelity.settings import settings_of
from sim.fidelity.skip import Skip
from sim.fidelity.where import parse_where, selected

COLUMNS = ("source", "model", "tp", "chips", "notes")


@pytest.fixture(scope="module")
def runs() -> tuple[MeasuredRun, ...]:
    return read_runs()


def by_id(runs: tuple[MeasuredRun, ...], run_id: str) -> MeasuredRun:
    return next(r for r in runs if r.run_id == run_id)


def test_bundled_file_is_whole(runs: tuple[MeasuredRun, ...]) -> None:
    assert len(runs) == 718
    assert sum(len(r.values) for r in runs) == 1483
    assert all(r.columns["source"] for r in runs)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("source = bloom", 62),
        ("source=bloom and tp>=8 and mbs < 2", None),
        ("source != bloom", 718 - 62),
        ("model ~ 'CANDIDATE'", 62),
        ('notes ~ "swapped"', None),
        ("", 718),
    ],
)
def test_where_selects(runs: tuple[MeasuredRun, ...], text: str, count: int | None) -> None:
    conditions = parse_where(text, tuple(runs[0].columns))
    found = [r for r in runs if selected(r, conditions)]
    if count is None:
        assert 0 < len(found) < 62
    else:
        assert len(found) == count


def test_where_quotes_hold_and() -> None:
    (one,) = parse_where("model = 'a and tp = 2'", COLUMNS)
    assert one.value == "a and tp = 2"
    assert len(parse_where("model = a and tp = 2", COLUMNS)) == 2


@pytest.mark.parametrize("text", ["tp", "tp > many", "colour = red", "tp = 1 and"])
def test_where_refuses(text: str) -> None:
    with pytest.raises(UsageError):
        parse_where(text, COLUMNS)


def test_reader_refuses(tmp_path: Path, runs: tuple[MeasuredRun, ...]) -> None:
    header = "run_id," + ",".join(
        c for c in runs[0].columns if c not in ("run_id", "notes", "flag", "kind")
    )
    file = tmp_path / "runs.csv"
    file.write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="column is missing"):
        read_runs(file)
    file.write_text(
        header + ",measured_metric,value,unit\n" + "x-1" + "," * header.count(",") + ",t,fast,s\n"
    )
    with pytest.raises(InputError, match="not a number"):
        read_runs(file)
    with pytest.raises(InputError, match="cannot read"):
        read_runs(tmp_path / "none.csv")


def test_settings_say_what_they_filled(runs: tuple[MeasuredRun, ...]) -> None:
    found = settings_of(by_id(runs, "korth-02-sel"))
    assert (found.tp, found.pp, found.vpp, found.recompute) == (8, 8, 3, "selective")
    assert found.sequence_parallel and not found.flash and not found.filled
    filled = {c for c, _, _ in settings_of(by_id(runs, "flagperf-01")).filled}
    assert {"gbs", "mbs", "recompute"} <= filled


def test_rules_read_no_measured_value(runs: tuple[MeasuredRun, ...]) -> None:
    """Settings stay the same when every value changes."""
    import msgspec

    for run in runs:
        values = tuple(msgspec.structs.replace(v, value=7.0 * v.value) for v in run.values)
        other = msgspec.structs.replace(run, values=values)
        try:
            expected = settings_of(run)
        except Skip as why:
            with pytest.raises(Skip) as again:
                settings_of(other)
            assert str(again.value) == str(why)
        else:
            assert settings_of(other) == expected


def test_layers_of_a_candidate_follow_from_its_parameters(runs: tuple[MeasuredRun, ...]) -> None:
    """200e9 = 250880 h + 12 h^2 l with h 14400: 78.9 layers, 80 on ten stages."""
    found = settings_of(by_id(runs, "bloom-007"))
    assert found.config["num_hidden_layers"] == 80
