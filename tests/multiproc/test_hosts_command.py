"""``shoal train`` with parameter servers and ``shoal run``, on hosts that a stand-in for ssh plays on loopback."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from support.processes.command import ROOT, wait_until
from support.processes.remote_shell import agent_pid, make_shell

pytestmark = [pytest.mark.soak, pytest.mark.timeout(400)]
TINY = ROOT / "recipes/tiny.toml"
SCRIPT = """
import os
from shoal import Run
with Run() as run:
    print("rank", os.environ["RANK"], "is", os.environ["LOCAL_RANK"], "of its host, plan", run.plan, flush=True)
"""


class Commands:
    """``shoal`` on loopback hosts; what is left of it is killed at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.shell = folder, make_shell(folder)
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *words: object, hosts: str = "") -> "subprocess.Popen[str]":
        where = ["--hosts", hosts, "--ssh", self.shell] if hosts else []
        command = [sys.executable, "-m", "shoal", *map(str, words), *where]
        given = {**os.environ, "OMP_NUM_THREADS": "1"}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.started.append(subprocess.Popen(command, cwd=self.folder, env=given, **streams))
        return self.started[-1]

    def end(self, process: "subprocess.Popen[str]") -> tuple[int, str]:
        said = process.communicate(timeout=300)[0]
        return process.returncode, said

    def train(self, run: str, *words: object, hosts: str = "", steps: int = 6) -> "subprocess.Popen[str]":
        sets = ["--set", f"train.steps={steps}", "--set", "train.threads=1"]
        return self.start("train", TINY, "--run-dir", self.folder / run, *sets, *words, hosts=hosts)

    def summary(self, run: str) -> dict:
        return json.loads((self.folder / run / "summary.json").read_text())


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    made = Commands(tmp_path)
    yield made
    for process in made.started:
        if process.poll() is None:
            process.kill()
            process.wait()
        process.stdout.close()


def _role(name: str) -> psutil.Process:
    """The process of a role, which is nobody's rank."""

    def found() -> list[psutil.Process]:
        words = name.split("-")
        return [
            one
            for one in psutil.process_iter(["cmdline"])
            if (line := one.info["cmdline"] or [])
            and words[0] in line
            and "role" in line
            and ["--index", words[1]] == line[-2:]
        ]

    wait_until(lambda: len(found()) == 1, name, seconds=120)
    return found()[0]


def test_parameter_servers_over_hosts_end_in_the_bits_of_dp_and_a_killed_role_comes_back(commands: Commands) -> None:
    process = commands.train("ps", "--plan", "ps=1 workers=2", hosts="127.0.0.1:2,localhost:1")
    _role("worker-1").send_signal(signal.SIGKILL)
    code, said = commands.end(process)
    assert code == 0 and "worker-1 (rank 2 on" in said and "it is started again" in said, said
    assert not list(Path("/tmp").glob("shoal-key-*")), "the key is on a disk"
    code, other = commands.end(commands.train("dp", "--plan", "dp=2"))
    assert code == 0, other
    assert commands.summary("ps")["weights_sha256"] == commands.summary("dp")["weights_sha256"]


def test_a_run_with_servers_is_stopped_in_order(commands: Commands) -> None:
    process = commands.train("ps", "--plan", "ps=1 workers=1", hosts="127.0.0.1:1,localhost:1", steps=100_000)
    events = commands.folder / "ps" / "events" / "rank-000.jsonl"
    wait_until(lambda: events.exists() and '"step"' in events.read_text(), "a step", seconds=120)
    process.send_signal(signal.SIGINT)
    code, said = commands.end(process)
    assert code == 130, said
    assert commands.summary("ps")["status"] == "interrupted"


def test_the_host_of_a_worker_may_be_lost(commands: Commands) -> None:
    words = ("--plan", "ps=1 workers=2", "--set", "paramserver.dead_seconds=3")
    process = commands.train("ps", *words, hosts="127.0.0.1:2,localhost:1", steps=30)
    _role("worker-1")
    os.kill(agent_pid(commands.folder, "localhost"), signal.SIGKILL)
    code, said = commands.end(process)
    assert code == 0 and "lost host localhost (ranks 2)" in said, said
    assert commands.summary("ps")["status"] == "completed"


def test_workers_of_several_processes_are_refused(commands: Commands) -> None:
    code, said = commands.end(commands.train("ps", "--plan", "ps=1 workers=1 tp=2", hosts="127.0.0.1:3"))
    assert code == 2 and "with --hosts roles are one process each" in said, said
    assert not (commands.folder / "ps").exists()


def test_a_script_runs_on_the_ranks_of_all_hosts(commands: Commands) -> None:
    (commands.folder / "script.py").write_text(SCRIPT)
    code, said = commands.end(commands.start("run", "script.py", "--run-dir", "run", hosts="127.0.0.1:1,localhost:2"))
    assert code == 0, said
    for rank, local in ((0, 0), (1, 0), (2, 1)):
        assert f"rank {rank} is {local} of its host, plan dp=3" in said, said


def test_another_script_on_one_host_is_refused(commands: Commands) -> None:
    (commands.folder / "script.py").write_text(SCRIPT)
    # Its shell changes the file before the ranks read it.
    (commands.folder / "localhost.env").write_text(f"echo '# other' >> {commands.folder}/script.py\n")
    code, said = commands.end(commands.start("run", "script.py", "--run-dir", "run", hosts="127.0.0.1:1,localhost:1"))
    assert code == 2 and "is not the one that the command was started with" in said, said
