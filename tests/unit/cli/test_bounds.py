"""Numbers that no machine could work off: refused at once, with both numbers, in place of minutes without a word."""

import os

import pytest

from shoal.planner.machine import num_cores
from shoal.trainer.layout import MOST_PER_CORE

pytestmark = pytest.mark.timeout(120)
MOST = MOST_PER_CORE * num_cores()


@pytest.mark.parametrize(
    ("verb", "more"),
    [
        ("tune", ("--nproc", 100_000)),
        ("train", ("--plan", "auto", "--nproc", 100_000)),
        ("train", ("--nproc", 100_000)),
        ("train", ("--plan", "dp=8192", "--set", "train.global_batch=8192")),
        ("verify", ("--nproc", 100_000)),
        ("verify", ("--all", "--nproc", 100_000)),
    ],
)
def test_more_processes_than_a_machine_runs(shoal, tiny, tmp_path, verb, more):
    """``tune --nproc 100000`` began to start them, and said nothing for minutes."""
    done = shoal(verb, tiny, *more, XDG_CACHE_HOME=str(tmp_path / "cache"))
    asked = 8192 if 100_000 not in more else 100_000
    assert done.returncode == 2, done.stderr
    assert f"{asked} processes are asked for" in done.stderr and f"run {MOST} at most" in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "runs").exists()
    assert not os.path.exists(tmp_path / "cache"), "nothing was timed before"


def test_a_dry_run_may_be_of_any_number(shoal, tiny):
    """It starts nothing, and is how a run for a launcher is looked at."""
    done = shoal("train", tiny, "--nproc", 4 * MOST, "--set", f"train.global_batch={4 * MOST}", "--dry-run")
    assert done.returncode == 0, done.stderr


def test_tune_asks_for_a_plan_before_it_times_the_machine(shoal, tiny, tmp_path):
    done = shoal("tune", tiny, "--nproc", 7, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert done.returncode == 2 and "no plan for 7 processes" in done.stderr, done.stderr
    assert not os.path.exists(tmp_path / "cache")
