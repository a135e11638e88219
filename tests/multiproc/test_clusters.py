"""``shoal train --on`` and job files with a real SLURM, Open MPI and Ray, on machines that are namespaces of their own.

Every one of them ends in the bits of a run that we start ourselves; a rank that is killed is named, and the exit code is 1.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from support.processes.machines import Machines, built_machines, kill_rank, processes_with
from support.processes.slurm import missing_programs, slurm_cluster

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
TINY = ROOT / "recipes/tiny.toml"
SHOAL = [sys.executable, "-m", "shoal"]
HASH = "d46569df"
"""Of ``recipes/tiny.toml`` after all of its steps under dp=2."""
ADDRESSES = {"login": "10.82.0.1", "n01": "10.82.0.11", "n02": "10.82.0.12"}
Run = Callable[..., "Started"]


class Started:
    """A ``shoal`` command on a machine, and what it says."""

    def __init__(self, words: list[str], log: Path, environment: dict[str, str]) -> None:
        self.log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                words, env=environment, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=log.parent
            )

    def end(self, seconds: float = 240.0) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"it did not end within {seconds:g} s:\n{self.said()}") from None

    def said(self) -> str:
        return self.log.read_text(errors="replace")


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with built_machines(tmp_path_factory.mktemp("machines"), ADDRESSES) as made:
        yield made


@pytest.fixture(scope="module")
def slurm(machines: Machines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    if missing := missing_programs():
        pytest.skip(f"SLURM needs {', '.join(missing)}; apt-get install slurmctld slurmd slurm-client munge")
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), machines=machines) as environment:
        yield environment


@pytest.fixture
def on_login(machines: Machines, tmp_path: Path) -> Iterator[Run]:
    """Start ``shoal`` on the login node, with an environment."""
    started: list[Started] = []

    def start(*words: object, environment: dict[str, str]) -> Started:
        command = [*machines.words("login"), *SHOAL, *map(str, words)]
        given = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        started.append(Started(command, tmp_path / f"said-{len(started)}", given))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()
    # A step's own daemon outlives its tasks for a moment.
    deadline = time.monotonic() + 20.0
    while processes_with("slurmstepd: [") and time.monotonic() < deadline:
        time.sleep(0.1)


@pytest.fixture
def mpi(machines: Machines, tmp_path: Path) -> dict[str, str]:
    if shutil.which("mpirun.openmpi") is None:
        pytest.skip("mpirun.openmpi is not there; apt-get install openmpi-bin")
    program = tmp_path / "bin" / "mpirun"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nexec mpirun.openmpi "$@"\n')
    program.chmod(0o755)
    network = "10.82.0.0/24"
    return {
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "OMPI_MCA_plm_rsh_agent": str(machines.shell_to(tmp_path)),
        "OMPI_MCA_oob_tcp_if_include": network,
        "OMPI_MCA_btl_tcp_if_include": network,
    }


@pytest.fixture
def ray() -> dict[str, str]:
    pytest.importorskip("ray", reason="needs the package ray; pip install 'shoal[ray]'")
    return {}


def _summary(run_dir: Path) -> dict:
    return json.loads((run_dir / "summary.json").read_text())


def _until(is_there: Callable[[], bool], what: str, started: Started, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_there():
        assert started.process.poll() is None, started.said()
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}:\n{started.said()}"
        time.sleep(0.1)


def _steps(run_dir: Path, rank: int = 1) -> int:
    try:
        return (run_dir / f"events/rank-{rank:03d}.jsonl").read_text().count('"kind": "step"')
    except OSError:
        return 0


def _endless(run_dir: Path) -> list[object]:
    return ["train", TINY, "--plan", "dp=2", "--set", "train.steps=100000", "--run-dir", run_dir]


def _has_the_bits(run_dir: Path) -> None:
    summary = _summary(run_dir)
    assert summary["status"] == "completed" and summary["world_size"] == 2
    assert summary["weights_sha256"].startswith(HASH)


def _names_the_culprit(started: Started, run_dir: Path, first: str) -> None:
    assert started.end(120.0) == 1, started.said()
    assert f"\nerror: {first}" in started.said(), started.said()
    summary = _summary(run_dir)
    assert summary["status"] == "failed" and summary["stopped_by"].startswith(first)
    events = [json.loads(line) for line in (run_dir / "events/supervisor.jsonl").read_text().splitlines()]
    assert [(one["kind"], one["culprit_rank"]) for one in events] == [("rank_failed", 1)]


def test_slurm_runs_the_recipe_on_two_nodes(slurm, on_login: Run, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = ["train", TINY, "--plan", "dp=2", "--on", "slurm", "--nodes", 2, "--run-dir", run_dir]
    started = on_login(*words, "--json", tmp_path / "result", environment=slurm)
    assert started.end() == 0, started.said()
    _has_the_bits(run_dir)
    assert json.loads((tmp_path / "result").read_text()) == _summary(run_dir)


def test_slurm_names_a_killed_rank_with_its_node(slurm, on_login: Run, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    started = on_login(*_endless(run_dir), "--on", "slurm", "--nodes", 2, environment=slurm)
    _until(lambda: _steps(run_dir) >= 2, "two steps", started)
    kill_rank(str(run_dir), "SLURM_PROCID", 1)
    _names_the_culprit(started, run_dir, "rank 1 on host n02 failed: killed by signal 9 (SIGKILL)")


def test_ctrl_c_ends_a_run_of_slurm_with_a_checkpoint(slurm, on_login: Run, machines, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    started = on_login(*_endless(run_dir), "--on", "slurm", "--nodes", 2, environment=slurm)
    _until(lambda: _steps(run_dir) >= 2, "two steps", started)
    (pid,) = [pid for pid in processes_with("-m shoal train") if _is_attached(pid, run_dir)]
    os.kill(pid, signal.SIGINT)
    assert started.end(120.0) == 130, started.said()
    summary = _summary(run_dir)
    assert (summary["status"], summary["stopped_by"]) == ("interrupted", "SIGINT")
    assert (run_dir / "checkpoints" / f"step-{summary['steps']:08d}").is_dir()
    # Jobs that ended are gone from the list at once, or as soon as their nodes are free.
    deadline = time.monotonic() + 30.0
    while (queued := machines.run("login", ["squeue", "--noheader"], env=slurm)).stdout.split():
        assert queued.returncode == 0 and time.monotonic() < deadline, queued
        time.sleep(0.2)


def _is_attached(pid: int, run_dir: Path) -> bool:
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return words[0] == sys.executable and "--on" in words and str(run_dir) in words


def test_a_job_file_of_slurm_is_accepted_and_runs(slurm, on_login: Run, machines, tmp_path: Path) -> None:
    run_dir, script = tmp_path / "run", tmp_path / "job.sh"
    words = [
        "job",
        "slurm",
        TINY,
        "--nodes",
        2,
        "--per-node",
        1,
        "--plan",
        "dp=2",
        "--run-dir",
        run_dir,
        "--time",
        "10",
    ]
    written = on_login(*words, "--out", script, environment=slurm)
    assert written.end(60.0) == 0, written.said()
    tested = machines.run("login", ["sbatch", "--test-only", str(script)], env=slurm)
    assert tested.returncode == 0, tested.stderr
    submitted = on_login(*words, "--submit", "--json", tmp_path / "result", environment=slurm)
    assert submitted.end(60.0) == 0, submitted.said()
    number = json.loads((tmp_path / "result").read_text())["submitted"].split()[-1]
    shown = ["scontrol", "show", "job", number]
    deadline = time.monotonic() + 240.0
    while "JobState=COMPLETED" not in (state := machines.run("login", shown, env=slurm).stdout):
        assert time.monotonic() < deadline and "JobState=FAILED" not in state, state
        time.sleep(0.5)
    _has_the_bits(run_dir)


@pytest.mark.parametrize("launcher", ["slurm", "mpi"])
def test_parameter_servers_start_as_processes_of_a_launcher(
    launcher: str, request: pytest.FixtureRequest, on_login: Run, tmp_path: Path
) -> None:
    """A server with the center on one node, two workers on both; the key is gone afterwards, and was nobody else's."""
    environment, run_dir = request.getfixturevalue(launcher), tmp_path / "run"
    words = ["train", TINY, "--set", "train.steps=6", "--set", "train.threads=1"]
    nodes = ["--hosts", "n01:2,n02:1"] if launcher == "mpi" else ["--nodes", 1]
    started = on_login(
        *words, "--plan", "ps=1 workers=2", "--on", launcher, *nodes, "--run-dir", run_dir, environment=environment
    )
    _until(lambda: any(run_dir.glob(".roles-*/key")), "the key", started)
    (key,) = run_dir.glob(".roles-*/key")
    assert key.stat().st_mode & 0o777 == 0o600
    assert started.end() == 0, started.said()
    assert not list(run_dir.glob(".roles-*"))
    own = on_login(*words, "--plan", "dp=2", "--run-dir", tmp_path / "own", environment={})
    assert own.end() == 0, own.said()
    assert _summary(run_dir)["weights_sha256"] == _summary(tmp_path / "own")["weights_sha256"]


def test_mpi_runs_the_recipe_on_two_hosts(mpi, on_login: Run, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = ["train", TINY, "--plan", "dp=2", "--on", "mpi", "--hosts", "n01:1,n02:1", "--run-dir", run_dir]
    started = on_login(*words, environment=mpi)
    assert started.end() == 0, started.said()
    _has_the_bits(run_dir)


def test_mpi_names_a_killed_rank_with_its_host(mpi, on_login: Run, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    started = on_login(*_endless(run_dir), "--on", "mpi", "--hosts", "n01:1,n02:1", environment=mpi)
    _until(lambda: _steps(run_dir) >= 2, "two steps", started)
    kill_rank(str(run_dir), "OMPI_COMM_WORLD_RANK", 1)
    _names_the_culprit(started, run_dir, "rank 1 on host n02 failed: killed by signal 9 (SIGKILL)")


def _here(tmp_path: Path, *words: object) -> Started:
    """A command on this machine."""
    given = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return Started([*SHOAL, *map(str, words)], tmp_path / "said", {**given, "OMP_NUM_THREADS": "1"})


def _left_of_ray() -> set[object]:
    names = {"raylet", "gcs_server"}
    running = {process.pid for process in psutil.process_iter(["name"]) if process.info["name"] in names}
    return running | set(Path(tempfile.gettempdir()).glob("shoal-ray-*"))


def test_ray_runs_the_recipe_and_leaves_nothing(ray, tmp_path: Path) -> None:
    before, run_dir = _left_of_ray(), tmp_path / "run"
    started = _here(tmp_path, "train", TINY, "--plan", "dp=2", "--on", "ray", "--run-dir", run_dir)
    assert started.end() == 0, started.said()
    _has_the_bits(run_dir)
    assert _left_of_ray() <= before


@pytest.mark.parametrize("whom", ["rank", "actor"])
def test_ray_names_a_killed_rank_or_its_actor(ray, whom: str, tmp_path: Path) -> None:
    before, run_dir = _left_of_ray(), tmp_path / "run"
    started = _here(tmp_path, *_endless(run_dir), "--on", "ray")
    _until(lambda: _steps(run_dir) >= 2, "two steps", started)
    (pid,) = [pid for pid, given in processes_with(f"--run-dir {run_dir}").items() if given.get("LOCAL_RANK") == "1"]
    actor = psutil.Process(pid).parent()
    assert actor is not None
    os.kill(pid if whom == "rank" else actor.pid, signal.SIGKILL)
    told = "killed by signal 9 (SIGKILL)" if whom == "rank" else "Ray says: The actor died unexpectedly"
    _names_the_culprit(started, run_dir, f"rank 1 on host {os.uname().nodename} failed: {told}")
    _until_gone(pid)
    assert _left_of_ray() <= before


def _until_gone(pid: int) -> None:
    deadline = time.monotonic() + 20.0
    while psutil.pid_exists(pid):
        assert time.monotonic() < deadline, f"process {pid} outlived its run"
        time.sleep(0.1)


def test_a_pod_of_an_indexed_job_starts_its_ranks(tmp_path: Path) -> None:
    """Two pods of two ranks on loopback, as their manifest starts them; they end in the bits of four ranks of ours."""
    port = _free_port()
    words = ["train", TINY, "--plan", "dp=4", "--set", "train.steps=4", "--set", "train.threads=1"]
    given = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    pods = [
        Started(
            [*SHOAL, *map(str, words), "--run-dir", str(tmp_path / "run"), "--per-node", "2"],
            tmp_path / f"pod-{index}",
            {**os.environ, **given, "JOB_COMPLETION_INDEX": str(index), "OMP_NUM_THREADS": "1"},
        )
        for index in range(2)
    ]
    for pod in pods:
        assert pod.end() == 0, "\n".join(one.said() for one in pods)
    own = _here(tmp_path, *words, "--run-dir", tmp_path / "own")
    assert own.end() == 0, own.said()
    assert _summary(tmp_path / "run")["weights_sha256"] == _summary(tmp_path / "own")["weights_sha256"]


def _free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
