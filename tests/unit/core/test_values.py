"""Units, seeds, deadlines, events and run-directory names."""

import itertools
from pathlib import Path

import pytest

from shoal.core.clock import Deadline
from shoal.core.errors import RequestError, RunError, did_you_mean, nearest
from shoal.core.events import StepDone
from shoal.core.rundir import RunDir
from shoal.core.seeding import derive_key
from shoal.core.units import format_bytes, format_count, format_duration, parse_bytes, parse_duration, parse_rate


def test_bytes_durations_and_counts_read_well():
    assert [format_bytes(count) for count in (0, 1023, 1536, 5 * 2**30)] == ["0 B", "1023 B", "1.5 KiB", "5.0 GiB"]
    assert [format_duration(seconds) for seconds in (1.25, 75, 3675)] == ["1.2s", "1:15", "1:01:15"]
    assert [format_count(count) for count in (12, 12345, 4_200_000)] == ["12", "12.3k", "4.2M"]


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("10m", 600), ("1h30m", 5400), ("1.5h", 5400), ("2d", 172800)]
)
def test_durations_parse(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "ten", "10x", "m", "1h-5m", "-5"])
def test_what_is_not_a_duration_is_refused(text):
    with pytest.raises(RequestError, match="not a duration"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "count"),
    [("4096", 4096), ("64 B", 64), ("1.5KiB", 1536), ("2 GiB", 2 * 2**30), ("2 GB", 2 * 10**9), ("1 tib", 2**40)],
)
def test_numbers_of_bytes_parse(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "2 gigs", "-1 GiB", "1 GiB 2", "1,5 GiB", "\u0662 GiB", "inf", "1e3"])
def test_what_is_not_a_number_of_bytes_is_refused(text):
    with pytest.raises(RequestError, match="not a number of bytes; write a number with KiB"):
        parse_bytes(text)


def test_bytes_per_second_parse_and_nothing_else_does():
    assert (parse_rate("10 GiB/s"), parse_rate(" 125MB / s ")) == (10 * 2**30, 125 * 10**6)
    for text in ("", "/s", "10 GiB", "10 GiB/m", "GiB/s", "1/2/s", "10 Gbit/s"):
        with pytest.raises(RequestError, match="is not bytes per second; write such as 10 GiB/s"):
            parse_rate(text)


def test_keys_depend_on_every_part_and_on_their_order():
    parts = [(1, "a", 2), (1, "a2"), ("1", "a", 2), (2, "a", 1), (1, "a", 2, 0), ("1a", 2)]
    keys = [derive_key(*part) for part in parts]
    assert len(set(keys)) == len(keys)
    assert derive_key(1, "dropout", 3) == derive_key(1, "dropout", 3)
    assert all(0 <= key < 2**64 for key in keys)


def test_a_key_never_changes_between_versions():
    # A changed key is a changed loss curve for every run that anyone wants to repeat.
    assert derive_key(1, "blocks.0.dropout", 7) == 9801288034817801244


def test_a_deadline_counts_down_and_stays_at_zero():
    assert Deadline(seconds=0.0).is_over and Deadline(seconds=0.0).remaining == 0.0
    assert 59 < Deadline(seconds=60).remaining <= 60
    Deadline(seconds=60).check("nothing")
    with pytest.raises(RunError, match="waited 0 s for rank 1"):
        Deadline(seconds=0.0).check("rank 1")


def test_nearest_names():
    assert nearest("layerz", ["layers", "heads"]) == "layers"
    assert nearest("qqq", ["layers", "heads"]) is None
    assert did_you_mean("qqq", ["b", "a"]) == "the choices are a, b"


def test_an_event_is_its_fields_with_its_kind():
    event = StepDone(step=1, loss=2.0, lr=0.1, grad_norm=1.0, samples=4, tokens=8, seconds=0.5, data_seconds=0.1)
    assert event.as_dict()["kind"] == "step"
    assert list(itertools.islice(event.as_dict(), 3)) == ["kind", "step", "loss"]


def test_the_run_directory_has_the_names_of_the_contract():
    run = RunDir(Path("runs/x"))
    assert str(run.events(0)) == "runs/x/events/rank-000.jsonl"
    assert [run.recipe.name, run.plan.name, run.summary.name] == ["recipe.toml", "plan.json", "summary.json"]
    assert [run.checkpoints.name, run.traces.name, run.tensorboard.name] == ["checkpoints", "traces", "tensorboard"]
