"""``shoal job`` and ``shoal train --on``: a wrong request gets one message and exit code 2, before anything starts."""

import json
import subprocess

import pytest
from typer.testing import CliRunner

from shoal.cli.main import app
from shoal.core.errors import RequestError, RunError

NODES = ("--nodes", 2, "--per-node", 1)
LAUNCHERS = ("slurm", "kubernetes", "ray", "mpi")


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def refuse(*words) -> str:
    """The message of a command that ends with exit code 2."""
    result = call(*words)
    if isinstance(result.exception, RequestError):
        return str(result.exception)
    assert result.exit_code == 2, result.output
    return result.output


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("SLURM_JOB_ID", "RAY_ADDRESS", "JOB_COMPLETION_INDEX", "WORKER_INDEX", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def hosts(launcher: str) -> list[str]:
    return ["--hosts", "a,b", "--mpi", "openmpi"] if launcher == "mpi" else []


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_plan_for_another_number_of_processes_is_refused_with_both(tiny, launcher):
    said = refuse("job", launcher, tiny, "--nodes", 3, "--per-node", 1, "--plan", "dp=2")
    assert "plan 'dp=2' has 2 process(es), and --nodes times --per-node are 3" in said
    said = refuse("job", launcher, tiny, "--nodes", 2, "--per-node", 2, "--plan", "ps=1 workers=2")
    assert "has 3 process(es), and --nodes times --per-node are 4" in said


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_recipes_plan_grows_to_the_nodes_that_are_asked_for(tiny, tmp_path, launcher):
    done = call("job", launcher, tiny, *NODES, *hosts(launcher), "--out", "job", "--json", "result")
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "result").read_text())
    assert (result["launcher"], result["nodes"], result["per_node"]) == (launcher, 2, 1)
    assert result["plan"].startswith("dp=2") and result["text"] == (tmp_path / "job").read_text()
    assert "dp=2" in result["text"] and not (tmp_path / "runs").exists()


def test_a_job_file_goes_to_stdout(tiny):
    done = call("job", "slurm", tiny, *NODES, "--set", "train.steps=7", "--resume")
    assert done.stdout.startswith("#!/bin/bash\n") and "--set train.steps=7" in done.stdout
    assert "--resume=auto" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("job", "slurm", "none.toml", *NODES), "none.toml"),
        (("job", "slurm", "TINY", *NODES, "--plan", "auto"), "plan 'auto' is picked for this machine"),
        (("job", "slurm", "TINY", *NODES, "--set", "train.stepz=3"), "stepz"),
        (("job", "slurm", "TINY", *NODES, "--out", "no/such/job"), "--out no/such/job: there is no folder"),
        (("job", "mpi", "TINY", *NODES, "--mpi", "openmpi"), "name the hosts: --hosts a:1,b:1"),
        (("job", "mpi", "TINY", *NODES, "--hosts", "a:1,b:2", "--mpi", "openmpi"), "--hosts a:1,b:2 are 3 process"),
        (
            ("job", "mpi", "TINY", *NODES, "--hosts", "a,b", "--mpi", "lam"),
            "--mpi lam: the choices are openmpi and mpich",
        ),
        (
            ("job", "slurm", "TINY", "--nodes", 3, "--per-node", 1, "--plan", "ps=1 workers=1 tp=2"),
            "group of 2 processes",
        ),
        (("train", "TINY", "--nodes", 2), "--nodes 2 needs --on slurm"),
        (("train", "TINY", "--on", "slurm", "--dry-run"), "leave out --nproc, --dry-run"),
        (("train", "TINY", "--on", "slurm", "--hosts", "a"), "slurm knows its own hosts"),
        (("train", "TINY", "--per-node", 2), "none is set; to start ranks on this machine alone, use --nproc 2"),
        (("train", "TINY", "--on", "mpi", "--plan", "dp=2", "--nodes", 3, "--per-node", 1), "--per-node are 3"),
        (("train", "TINY", "--on", "mpi", "--plan", "dp=2", "--nodes", 3), "the plan has 2"),
    ],
)
def test_a_wrong_request(tiny, words, message):
    assert message in refuse(*(tiny if word == "TINY" else word for word in words))


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_an_elastic_run_is_refused_before_a_file_is_written(tiny, tmp_path, launcher):
    """It was started as any other, and the first rank that died ended it."""
    shrink = ("--set", "elastic.mode=shrink")
    fix = "start the run with `shoal train RECIPE --hosts a:N,b:N`"
    assert fix in refuse("job", launcher, tiny, *NODES, *hosts(launcher), *shrink, "--out", "job")
    assert not (tmp_path / "job").exists()
    if launcher != "kubernetes":
        assert fix in refuse("train", tiny, "--on", launcher, "--plan", "dp=2", *shrink)


@pytest.mark.parametrize(
    ("launcher", "message"),
    [
        ("slurm", "sbatch is not here; install SLURM's commands (Debian: apt-get install slurm-client)"),
        ("kubernetes", "kubectl is not here"),
        ("ray", "ray is not here; run `pip install 'shoal[ray]'"),
        ("mpi", "mpirun is not here; install Open MPI or MPICH (Debian: apt-get install openmpi-bin)"),
    ],
)
def test_a_program_that_is_missing_is_named_with_its_package(tiny, tmp_path, monkeypatch, launcher, message):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert message in refuse("job", launcher, tiny, *NODES, *hosts(launcher), "--submit")
    if launcher in ("slurm", "mpi"):
        said = refuse("train", tiny, "--on", launcher, "--plan", "dp=2")
        assert f"{'srun' if launcher == 'slurm' else 'mpirun'} is not here" in said


def test_what_the_program_says_is_passed_on(tiny, tmp_path, monkeypatch):
    """A program of the name of sbatch that keeps what it is given, and one that refuses."""
    program = tmp_path / "sbatch"
    program.write_text(f"#!/bin/sh\n/bin/cat >{tmp_path}/given\necho Submitted batch job 7\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    done = call("job", "slurm", tiny, *NODES, "--submit", "--json", "result")
    assert done.exit_code == 0 and done.stdout == "Submitted batch job 7\n"
    result = json.loads((tmp_path / "result").read_text())
    assert result["submitted"] == "Submitted batch job 7" and (tmp_path / "given").read_text() == result["text"]
    program.write_text("#!/bin/sh\nexit 1\n")
    done = call("job", "slurm", tiny, *NODES, "--submit")
    assert isinstance(done.exception, RunError) and "refused the job, with exit code 1" in str(done.exception)


def test_a_task_of_slurm_does_not_start_a_step_of_its_own(tiny, monkeypatch):
    for name, value in {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_PROCID": "1",
    }.items():
        monkeypatch.setenv(name, value)
    said = refuse("train", tiny, "--on", "slurm", "--plan", "dp=2")
    assert "this is already task 1 of 2: leave out --on under srun" in said


def test_ray_that_is_missing_is_named_with_its_package(tiny, tmp_path):
    """In an interpreter of its own, where an import of ray fails whether it is installed or not."""
    code = "import sys; sys.modules['ray'] = None; sys.argv[0] = 'shoal'; from shoal.cli.main import main; main()"
    import sys

    words = [sys.executable, "-c", code, "train", str(tiny), "--on", "ray", "--plan", "dp=2"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 2 and "run `pip install 'shoal[ray]'`" in done.stderr, done.stderr
