"""Runs that other launchers start: a real Open MPI, MPICH and SLURM, where they are installed."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.processes.slurm import missing_programs, slurm_cluster

ROOT = Path(__file__).parents[2]
SHOAL = [sys.executable, "-m", "shoal"]
MPI = {
    "openmpi": ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe"],
    "mpich": ["mpirun.mpich"],
}


def _run(command: list[str], seconds: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=given)


def _train(run_dir: Path) -> list[str]:
    small = ["--set", "train.steps=4", "--set", "train.threads=1"]
    return [*SHOAL, "train", str(ROOT / "recipes/tiny.toml"), "--plan", "dp=2", "--run-dir", str(run_dir), *small]


def _hash(run_dir: Path) -> str:
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["world_size"] == 2 and summary["status"] == "completed"
    return str(summary["weights_sha256"])


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    if missing := missing_programs():
        pytest.skip(f"SLURM needs {', '.join(missing)}; apt-get install slurmctld slurmd slurm-client munge")
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment


def _mpi(name: str) -> list[str]:
    if shutil.which(MPI[name][0]) is None:
        pytest.skip(f"{MPI[name][0]} is not there; apt-get install {'openmpi-bin' if name == 'openmpi' else 'mpich'}")
    return MPI[name]


@pytest.mark.parametrize("name", sorted(MPI))
def test_processes_of_mpi_know_their_place(name: str) -> None:
    found = _run([*_mpi(name), "-np", "2", *SHOAL, "place"])
    assert found.returncode == 0, found.stderr
    for words in (f"launcher         {name}", "0 of 2", "1 of 2", "127.0.0.1:2"):
        assert words in found.stdout, found.stdout


def _as_rank(rank: int) -> dict[str, str]:
    """What torchrun tells one of two ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


@pytest.mark.parametrize("plan", ["dp=2", "ps=1 workers=1"])
def test_a_rank_that_does_not_come_is_named_within_the_recipes_deadline(shoal, tiny, plan: str) -> None:
    """Whatever ``elastic.start_deadline`` said, those that had come waited for two minutes."""
    wait = ["--plan", plan, "--set", "elastic.start_deadline=1.5"]
    ended = shoal.run("train", tiny, *wait, expect=1, environment=_as_rank(0), timeout=30)
    assert "rank 1 of 2 did not come within 1.5 s (rank 0 on" in ended.stderr
    lost = shoal.run("train", tiny, *wait, expect=1, environment=_as_rank(1), timeout=30)
    assert "rank 1 cannot reach rank 0 at 127.0.0.1:" in lost.stderr and "1500ms" in lost.stderr


def test_an_elastic_run_is_refused_by_the_first_rank(shoal, tiny) -> None:
    shared = _as_rank(0)
    asked = ["train", tiny, "--plan", "dp=2", "--set", "elastic.mode=shrink", "--run-dir", "run"]
    other = shoal.start(*asked, environment={**shared, "RANK": "1"})
    refused = shoal.run(*asked, expect=2, environment=shared)
    assert "start the run with `shoal train RECIPE --hosts a:N,b:N`" in refused.stderr
    assert other.wait(30) == 2 and not (shoal.folder / "run").exists()


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(MPI))
def test_a_run_under_mpi_ends_in_the_bits_of_one_that_we_start(name: str, tmp_path: Path) -> None:
    ended = _run([*_mpi(name), "-np", "2", *_train(tmp_path / "mpi")])
    assert ended.returncode == 0, ended.stderr
    assert _run(_train(tmp_path / "own")).returncode == 0
    assert _hash(tmp_path / "mpi") == _hash(tmp_path / "own")


@pytest.mark.soak
def test_a_run_under_slurm_ends_in_the_bits_of_one_that_we_start(slurm: dict[str, str], tmp_path: Path) -> None:
    """On one node, and with a task on each of two."""
    ended = _run(["srun", "-N1", "-n2", "--overcommit", *_train(tmp_path / "one")], **slurm)
    assert ended.returncode == 0, ended.stderr
    two = {**slurm, "MASTER_ADDR": "127.0.0.1"}
    ended = _run(["srun", "-N2", "-n2", "--overcommit", *_train(tmp_path / "two")], **two)
    assert ended.returncode == 0, ended.stderr
    assert _run(_train(tmp_path / "own")).returncode == 0
    assert _hash(tmp_path / "one") == _hash(tmp_path / "two") == _hash(tmp_path / "own")


@pytest.mark.soak
def test_what_slurm_makes_no_rank_of_is_refused(slurm: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/sh\nexec " + " ".join(_train(tmp_path / "batch")) + "\n")
    asked = ["sbatch", "-N2", "-n2", "--overcommit", "--wait", "-o", str(tmp_path / "out"), str(script)]
    assert _run(asked, **slurm).returncode == 2
    assert "and not one of its 2 tasks; write `srun shoal train ...` in it" in (tmp_path / "out").read_text()
    asked = ["srun", "-N1", "-n2", "--overcommit", *SHOAL, "verify", str(ROOT / "recipes/tiny.toml"), "--plan", "dp=2"]
    refused = _run(asked, **slurm)
    assert refused.returncode == 2 and "rank 1 of 2 of slurm" in refused.stderr, refused.stderr
