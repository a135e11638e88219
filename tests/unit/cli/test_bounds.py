"""Numbers that no machine could work off: refused at once, with both numbers, in place of minutes without a word."""

import os

import pytest

from shoal.engine.resolve import MOST_PER_CORE
from shoal.planner.hardware.machine import num_cores

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


@pytest.mark.parametrize(
    ("plan", "more", "words"),
    [
        ("dp=8", ("--global-batch", 999999999999999), ["global batch is 999999999999999; give 1 to 1000000"]),
        ("pp=2 microbatches=1000000", ("--global-batch", 1_000_000, "--devices", 2), ["1000000 microb", "give 50000 microb"]),
        ("dp=8", ("--set", "train.micro_batch=1", "--global-batch", 1_000_000), ["125000 microb", "give 100000 microb"]),
        ("dp=8", ("--steps", 10**8, "--jitter", 0.1), ["--steps is 100000000", "give --steps 99"]),
        ("dp=8", ("--steps", 10**9), ["--steps is 1000000000", "give --steps 1000000 "]),
        ("pp=2 schedule=pipedream", ("--steps", 10**6, "--link-jitter", 0.1), ["--steps is 1000000", "give --steps"]),
        ("dp=8", ("--local-steps", 10**9, "--jitter", 0.1), ["--local-steps is 1000000000", "give --local-steps 12"]),
        ("dp=8", ("--jitter", "1e9"), ["jitter is 1e+09", "0 to 100"]),
        ("dp=8", ("--mtbf", "1e-9"), ["no interval helps", "--mtbf 0.7"]),
        ("dp=8", ("--mtbf", 1, "--restart", 0, "--days", 36500), ["failures", "1000000 are played at most", "give --days"]),
    ],
)  # fmt: skip
def test_a_simulation_without_end(shoal, tiny, plan, more, words):
    """Some of these printed nothing for ever."""
    done = shoal("simulate", tiny, "--cluster", "h100:1x8", "--plan", plan, "--global-batch", 64, *more)
    assert done.returncode == 2, done.stderr + done.stdout
    for word in words:
        assert word in done.stderr


def test_what_cannot_be_written_is_said_before_the_work(shoal, tiny, tmp_path):
    """A run directory was tried after the simulation, exit 1; a machine file after half a minute of timing."""
    (tmp_path / "file").write_text("")
    for folder, word in (("/proc/x", "cannot be made"), (tmp_path / "file", "is a file"), ("file/x", "is a file")):
        done = shoal("simulate", tiny, "--cluster", "h100:1x8", "--plan", "dp=8", "--run-dir", folder)
        assert done.returncode == 2 and f"--run-dir {folder}" in done.stderr and word in done.stderr, done.stderr
    done = shoal("calibrate", tmp_path / "nope" / "x.json")
    assert done.returncode == 2 and "there is no folder" in done.stderr and "timing" not in done.stderr, done.stderr


# Half a minute of one core, by its own rule.
@pytest.mark.soak
def test_the_largest_that_is_taken_is_played(shoal, tiny):
    more = ("--global-batch", 1024, "--steps", 90_000, "--jitter", 0.1, "--devices", 1)
    done = shoal("simulate", tiny, "--cluster", "h100:1x8", "--plan", "dp=1", *more)
    assert done.returncode == 0, done.stderr
