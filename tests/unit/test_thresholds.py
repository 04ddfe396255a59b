from __future__ import annotations

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from sim.cli_output import check_folder, check_output
from sim.errors import InputError, ThresholdError, UsageError
from sim.report.gantt import PICTURES
from sim.thresholds import fail_if, read_thresholds


@pytest.mark.parametrize(
    ("text", "metric", "limit"),
    [
        ("step_time>2s", "step_time_s", 2.0),
        ("step time > 500 ms", "step_time_s", 0.5),
        ("step_time_s>=1e-3", "step_time_s", 1e-3),
        ("mfu<60%", "mfu", 0.6),
        ("MFU<=0.6", "mfu", 0.6),
        ("bubble > 10 %", "bubble_fraction", 0.1),
        ("throughput<200k", "tokens_per_s", 2e5),
        ("exposed comm. > 1 min", "exposed_comm_s", 60.0),
        ("cost>0.05", "cost_per_mtoken", 0.05),
    ],
)
def test_conditions_by_name_label_and_unit(text, metric, limit):
    (found,) = read_thresholds([text])
    assert (found.metric, found.limit) == (metric, pytest.approx(limit))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step_time", "expected METRIC<VALUE"),
        ("speed>1", "no metric speed; one of .*tokens_per_s"),
        ("mfu<60 s", "--fail-if mfu<60 s: .*expected"),
        ("step_time>2%", "--fail-if step_time>2%: "),
        ("exposed_by_group>1", "no metric exposed_by_group"),
    ],
)
def test_wrong_conditions_name_themselves(text, message):
    with pytest.raises(UsageError, match=message):
        read_thresholds([text])


def test_a_condition_holds_or_not_or_cannot_be_known():
    fail_if(["mfu<60%"], {"mfu": 0.6})
    with pytest.raises(ThresholdError, match=r"mfu is 0\.59"):
        fail_if(["mfu<60%"], {"mfu": 0.59})
    with pytest.raises(UsageError, match="mfu is unknown for this plan"):
        fail_if(["mfu<60%"], {})


def test_every_picture_ending_can_be_written():
    known = FigureCanvasAgg.get_supported_filetypes()
    assert {p.lstrip(".") for p in PICTURES} <= set(known)


def test_outputs_that_cannot_be_written(tmp_path):
    check_output(None, "-o")
    check_output(tmp_path / "new.json", "-o")
    check_folder(tmp_path / "a" / "b", "--folder")
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(InputError, match="is a file"):
        check_folder(file / "b", "--folder")
    with pytest.raises(InputError, match="no folder"):
        check_output(file / "x.json", "-o")
    with pytest.raises(UsageError, match=r"ends in one of \.png"):
        check_output(tmp_path / "p.gif", "--gantt", PICTURES)
