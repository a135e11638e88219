"""The ``shoal`` command as a real process, and how tests look at a run from outside."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from support.processes import warm

ROOT = Path(__file__).resolve().parents[3]
SUPPORT = ROOT / "tests" / "support"


def python_of_session(*arguments):
    """The command line of an interpreter that is killed when this test session is."""
    return [sys.executable, str(SUPPORT / "processes" / "parent_death.py"), str(os.getpid()), *map(str, arguments)]


TINY = """
plan = "dp=1"
[model]
name = "gpt"
layers = 2
hidden = 32
heads = 4
kv_heads = 2
dropout = 0.1
[data]
source = "stdlib"
sequence = 16
limit_bytes = 200000
[train]
steps = 8
global_batch = 8
threads = 1
[optim]
name = "adamw"
lr = 1e-3
[eval]
samples = 16
[checkpoint]
every = 3
[telemetry]
tensorboard = false
"""


def start_command(*arguments, environment=None, real=False, before=(), **options):
    """Start ``shoal ARGUMENTS`` as a child that is killed when this test session is.

    It is a fork of a process with everything imported (``warm.py``), or, if it has to be ``real`` or to
    be started by words ``before``, an interpreter of its own.
    """
    words = [str(argument) for argument in arguments]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    if not real and not before and warm.can_fork(variables):
        return warm.ForkedCommand(words, env=variables, **options)
    return subprocess.Popen([*before, *python_of_session("-m", "shoal", *words)], env=variables, **options)


@dataclass
class Shoal:
    """Runs the command line in a folder of its own."""

    folder: Path
    started: list[subprocess.Popen] = field(default_factory=list)

    def start(self, *arguments, environment=None, real=False, **options):
        """Start ``shoal ARGUMENTS`` and return at once."""
        process = start_command(
            *arguments,
            environment=environment,
            real=real,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )
        self.started.append(process)
        return process

    def run(self, *arguments, expect=0, timeout=90, environment=None, real=False):
        """Run ``shoal ARGUMENTS`` to its end and check its exit code."""
        process = self.start(*arguments, environment=environment, real=real)
        stdout, stderr = process.communicate(timeout=timeout)
        code = process.returncode
        assert code == expect, f"exit {code}, expected {expect}\n--- stdout\n{stdout}\n--- stderr\n{stderr}"
        return subprocess.CompletedProcess(arguments, code, stdout, stderr)

    def end(self):
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.communicate()


def read_summary(run_dir):
    return json.loads((Path(run_dir) / "summary.json").read_text())


def read_events(run_dir, rank=0, kind=None):
    lines = (Path(run_dir) / "events" / f"rank-{rank:03d}.jsonl").read_text().splitlines()
    events = []
    for line in lines:
        try:
            events.append(json.loads(line))
        except ValueError:
            continue  # the last line of a killed rank may be torn
    return [event for event in events if kind is None or event["kind"] == kind]


def wait_until(condition, what, seconds=30.0):
    """Poll until ``condition()`` is true, and return its value; fail with ``what`` at the deadline."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    pytest.fail(f"waited {seconds:g} s for {what}")


def ranks_of(process):
    """The rank processes of a running ``shoal train``, by rank: the log of each says which process it is."""
    found = {}
    for child in psutil.Process(process.pid).children():
        try:
            words, folder = child.cmdline(), Path(child.cwd())
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if "shoal.trainer.worker" in words:
            logs = folder / words[words.index("shoal.trainer.worker") + 1] / "logs"
            for path in sorted(logs.glob("rank-*.log")):
                if f", pid {child.pid} ---" in path.read_text(errors="replace"):
                    found[int(path.stem.partition("-")[2])] = child
    return found


def wait_for_step(run_dir, step, seconds=60.0, rank=0):
    """Wait until a live run has done ``step`` steps, by its events."""

    def reached():
        path = Path(run_dir) / "events" / f"rank-{rank:03d}.jsonl"
        return path.exists() and any(event["step"] >= step for event in read_events(run_dir, rank, "step"))

    wait_until(reached, f"step {step} of {run_dir}", seconds)


def listening_inode(port):
    """The inode of the socket that listens on a port of loopback: unlike the port it is nobody else's a moment later."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1] == f"0100007F:{port:04X}" and fields[3] == "0A":
            return fields[9]
    return None
