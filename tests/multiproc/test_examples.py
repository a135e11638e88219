"""The examples run as their first lines say, on one process and on two."""

import os
import shutil
import subprocess
import sys

import pytest

from support.processes.command import ROOT

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.parametrize(
    "launcher", [pytest.param((), id="python"), pytest.param(TORCHRUN, id="torchrun", marks=pytest.mark.soak)]
)
def test_the_library_inside_your_own_loop(launcher):
    command = [sys.executable, *launcher, str(ROOT / "examples" / "library.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "step 60: loss" in done.stdout and "accuracy 1.00" in done.stdout
    assert done.stdout.count("step 60") == 1


@pytest.mark.parametrize(
    ("name", "launcher"),
    [
        pytest.param("run.py", None, id="run.py"),
        pytest.param("port_after.py", None, id="port_after.py"),
        pytest.param("run.py", TORCHRUN, id="run.py under torchrun", marks=pytest.mark.soak),
    ],
)
def test_a_script_prints_the_same_under_python_and_under_shoal_run(shoal, name, launcher):
    script = ROOT / "examples" / name
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    alone = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=90, check=True, env=environment
    )
    printed = [line for line in alone.stdout.splitlines() if line.startswith("epoch")]
    if launcher is None:
        both = shoal.run("run", script, "--plan", "dp=2 zero=1", "--run-dir", "run")
    else:
        both = subprocess.run(
            [sys.executable, *launcher, str(script)],
            capture_output=True,
            text=True,
            timeout=90,
            check=True,
            env=environment,
        )
        assert [line for line in both.stdout.splitlines() if line.startswith("epoch")] == printed
    assert len(printed) >= 5 and all(line in both.stdout + both.stderr for line in printed)


def test_the_port_from_accelerate_changes_five_lines_at_most():
    before, after = (
        (ROOT / "examples" / f"port_{name}.py").read_text().splitlines()[5:] for name in ("before", "after")
    )
    assert len([line for line in after if line and line not in before]) <= 5


def test_your_own_model_loss_and_data(shoal):
    for name in ("own_model.py", "own_model.toml"):
        shutil.copy(ROOT / "examples" / name, shoal.folder / name)
    short = ("--set", "train.epochs=3", "--set", "eval.samples=5")
    done = shoal.run("train", "own_model.toml", "--plan", "dp=2", "--run-dir", "run", *short)
    # A row of numbers is a sample, not a token, and a classifier is judged by its accuracy.
    assert " samples/s, dp=2" in done.stdout and "tokens/s" not in done.stdout and ", accuracy " in done.stdout
    some = shoal.run("eval", "run", "--split", "test")
    assert "accuracy" in some.stdout and "samples: 5\n" in some.stdout and "--samples 0 uses all" in some.stderr
    every = shoal.run("eval", "run", "--split", "test", "--samples", "0")
    assert "samples: 5\n" not in every.stdout and "--samples" not in every.stderr


def test_examples_are_short():
    assert len((ROOT / "examples" / "own_model.py").read_text().splitlines()) < 40
    for path in (ROOT / "examples").glob("*.py"):
        assert len(path.read_text().splitlines()) < 80
