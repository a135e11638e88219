"""A real ``shoal train`` with parameter servers, seen from outside: its members by name, its steps by its events, its end."""

import json
import os
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from support.processes.command import ROOT, read_summary, start_command, wait_until

RECIPE = """
plan = "dp=1"
[model]
build = "support.models.paced:build"
args = { seconds = 0.08 }
[data]
source = "stdlib"
sequence = 16
limit_bytes = 60000
[train]
steps = 30
global_batch = 8
threads = 1
seed = 1
[optim]
name = "adamw"
lr = 1e-3
[eval]
samples = 8
[checkpoint]
every = 5
[telemetry]
tensorboard = false
[paramserver]
dead_seconds = 20.0
"""
"""A healthy member of a busy machine is not silent for so long; a killed one is told of by its job at once."""
STEPS = 30
PLAN = "ps=2 workers=2 update=bsp backup=1"
END_SECONDS = 240.0


def rationed(ration: Path, recipe: str = RECIPE, seconds: float = 0.08) -> str:
    """The recipe with a ration of passes (``support.models.paced.Ration``): until it is raised, the run cannot end.

    A kill of a run that only lasts a while may come after its end, on a machine where the test is slow or the run is fast. A
    worker without a ration waits in its compute, where it would hang in the eyes of the watch: the watch is off.
    """
    allowed = f'args = {{ seconds = {seconds}, ration = "{ration}" }}'
    return recipe.replace("args = { seconds = 0.08 }", allowed) + "hang_after = 0\n"


class ServerJob:
    """One run, started at once."""

    def __init__(
        self, folder: Path, *arguments: str, plan: str = PLAN, run_dir: Path | None = None, recipe: str = RECIPE
    ):
        folder.mkdir(parents=True, exist_ok=True)
        self.run_dir = run_dir or folder / "run"
        path = folder / "recipe.toml"
        path.write_text(recipe)
        self._log = (folder / f"log-{time.monotonic_ns()}.txt").open("w+")
        words = ["train", path, "--plan", plan, "--run-dir", self.run_dir, *arguments]
        path = {"PYTHONPATH": _python_path()}
        self.process = start_command(
            *words, environment=path, cwd=folder, stdout=self._log, stderr=subprocess.STDOUT, text=True
        )

    @property
    def output(self) -> str:
        return Path(self._log.name).read_text()

    def members(self) -> dict[str, int]:
        """The pid of every living member, by name."""
        found = {}
        for process in psutil.process_iter(["cmdline", "status"]):
            words = process.info["cmdline"] or []
            roles = {"shoal.serverrun.job.role", "shoal.serverrun.center"}
            is_role = not roles.isdisjoint(words) and "--name" in words
            if is_role and str(self.run_dir) in words and process.info["status"] != psutil.STATUS_ZOMBIE:
                found[words[words.index("--name") + 1]] = process.pid
        return found

    def pid(self, name: str) -> int:
        return wait_until(lambda: self.members().get(name), f"{name} to be there")

    def events(self, kind: str) -> list[dict]:
        found = []
        for path in sorted((self.run_dir / "events").glob("rank-*.jsonl")):
            for line in path.read_text().splitlines():
                try:
                    event = json.loads(line)
                except ValueError:
                    continue  # the last line of a killed process may be torn
                if event["kind"] == kind:
                    found.append(event)
        return found

    def step(self) -> int:
        return max((event["step"] for event in self.events("step")), default=0)

    def wait_for_step(self, step: int, seconds: float = 90.0) -> None:
        def reached():
            if self.process.poll() is not None and self.step() < step:
                pytest.fail(f"it ended at step {self.step()} of {step}:\n{self.output}")
            return self.step() >= step

        wait_until(reached, f"step {step}", seconds)

    def wait_for_log(self, rank: int, text: str, seconds: float = 60.0) -> None:
        path = self.run_dir / "logs" / f"rank-{rank:03d}.log"
        wait_until(lambda: path.exists() and text in path.read_text(), f"{text!r} in the log of rank {rank}", seconds)

    def center(self) -> str:
        """The name of the center that leads: the one that said so last."""
        said = {}
        for name, rank in self.ranks("center").items():
            path = self.run_dir / "logs" / f"rank-{rank:03d}.log"
            epochs = [line for line in path.read_text().splitlines() if line.startswith(("epoch ", "center of epoch "))]
            if epochs:
                said[name] = int(epochs[-1].removeprefix("center of ").split()[1].rstrip(":"))
        return max(said, key=said.get)

    def ranks(self, role: str) -> dict[str, int]:
        found = {}
        for path in sorted((self.run_dir / "logs").glob("rank-*.log")):
            first = path.read_text().split("\n", 1)[0]
            if first.startswith(f"--- {role}-"):
                found[first.split()[1].rstrip(",")] = int(path.stem.partition("-")[2])
        return found

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        """Send a signal to a member; its pid."""
        pid = self.pid(name)
        os.kill(pid, number)
        return pid

    def wait_for_other(self, name: str, pid: int, seconds: float = 60.0) -> int:
        """Wait until a member has come back as another process, and the one that it was is gone."""

        def is_back():
            if self.process.poll() is not None:
                pytest.fail(f"it ended, and {name} had not come back:\n{self.output}")
            return self.members().get(name, pid) != pid and not psutil.pid_exists(pid)

        return wait_until(is_back, f"{name} to come back", seconds)

    def end(self, expect: int = 0, seconds: float = END_SECONDS) -> dict:
        """Wait for the end; its summary."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            for pid in self.members().values():
                os.kill(pid, signal.SIGUSR1)
            time.sleep(0.5)
            self.stop()
            pytest.fail(f"it did not end within {seconds:g} s:\n{self.output}\n{self.logs()}")
        assert code == expect, f"exit {code}, expected {expect}:\n{self.output}\n{self.logs()}"
        assert self.members() == {}, "members outlive their run"
        return read_summary(self.run_dir) if (self.run_dir / "summary.json").exists() else {}

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        wait_until(lambda: not self.members(), "the members to die with their job")
        self._log.close()

    def logs(self) -> str:
        texts = [
            f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.run_dir.glob("logs/rank-*.log"))
        ]
        return "\n".join(texts)


def _python_path() -> str:
    paths = [str(ROOT / "tests"), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(path for path in paths if path)


def check_steps(run: ServerJob, total: int) -> None:
    """Every step was told, and the checkpoint that the summary speaks of is whole."""
    told = Counter(event["step"] for event in run.events("step"))
    assert set(told) == set(range(1, total + 1)), sorted(told)
    folders = sorted(path.name for path in (run.run_dir / "checkpoints").iterdir())
    assert not [name for name in folders if name.startswith(".")], f"half a checkpoint is left: {folders}"


@pytest.fixture
def start_job(tmp_path):
    """Starts runs, and ends those that a test left."""
    started = []

    def start(*arguments, **options):
        run = ServerJob(options.pop("folder", tmp_path), *arguments, **options)
        started.append(run)
        return run

    yield start
    for run in started:
        run.stop()
