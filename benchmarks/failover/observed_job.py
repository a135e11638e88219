"""One ``shoal train`` with parameter servers, seen from outside: its processes, its center, its view, its end; and a newcomer."""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
from records import Records

from shoal.comm.wire.errors import WireError
from shoal.comm.wire.node import Node, new_instance_id
from shoal.core.config import read_toml, validate
from shoal.elastic.election.filelease import read_center
from shoal.elastic.view import View
from shoal.paramserver.contact import Contact
from shoal.paramserver.messages import OPERATIONS, Ask, Join, Told
from shoal.paramserver.worker.flat import describe_model
from shoal.serverrun.process import shared_settings
from shoal.trainer.build import build_parts
from shoal.trainer.config import Recipe

HERE = Path(__file__).resolve().parent
DEADLINE_SECONDS = 60.0
LOOK_SECONDS = 0.02
MODULES = {"shoal.serverrun.job.role", "shoal.serverrun.center"}
RECIPE = """
plan = "ps=2 workers=2 update=bsp backup={backup}"
[model]
build = "recording:build"
args = {{ log = "{log}" }}
[data]
source = "stdlib"
sequence = 32
limit_bytes = 1000000
[train]
steps = {steps}
global_batch = 16
seed = 1
threads = 1
[optim]
name = "adamw"
lr = 1e-3
[eval]
samples = 64
[checkpoint]
every = 100
[telemetry]
tensorboard = false
[paramserver]
max_respawns = 1000000
"""
NUM_SERVERS = NUM_WORKERS = NUM_CENTERS = 2


@dataclass(frozen=True, kw_only=True)
class Process:
    """A living process of the run."""

    name: str
    instance_id: str
    pid: int


class ObservedJob:
    """Starts at once; ``with`` ends it, whatever happens."""

    def __init__(self, folder: Path, *, backup: int = 1) -> None:
        self.run_dir, self.backup = folder / "run", backup
        log = folder / "records"
        log.mkdir()
        self.records = Records(log)
        recipe = folder / "recipe.toml"
        recipe.write_text(RECIPE.format(backup=backup, log=log, steps=10_000_000))
        self.output = folder / "output.txt"
        with self.output.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "shoal", "train", str(recipe), "--run-dir", str(self.run_dir)],
                env=environment(),
                stdout=output,
                stderr=output,
            )
        self.folder: Path | None = None
        """Sockets and leases of the job."""
        self.killed: set[str] = set()
        """Instances that a whole job does not have any more."""
        self._node: Node | None = None

    async def __aenter__(self) -> "ObservedJob":
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._node is not None:
            await self._node.close()
        if self._process.poll() is None:
            self._process.kill()  # Its members die with it.
            self._process.wait()

    def processes(self) -> dict[str, Process]:
        """Servers, workers and candidates for the center that live, by name."""
        found = {}
        for child in psutil.Process(self._process.pid).children():
            try:
                words = child.cmdline()
                is_alive = child.status() != psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:
                continue
            if is_alive and not MODULES.isdisjoint(words) and "--instance-id" in words:
                given = dict(itertools.pairwise(words))
                self.folder = self.folder or Path(given["--folder"])
                found[given["--name"]] = Process(
                    name=given["--name"], instance_id=given["--instance-id"], pid=child.pid
                )
        return found

    def leader(self) -> str | None:
        """The name of the center that leads."""
        center = None if self.folder is None else read_center(self.folder / "lease")
        return None if center is None else center.name

    async def view(self) -> View | None:
        """What the center says; None when nobody answers."""
        center = None if self.folder is None else read_center(self.folder / "lease")
        if center is None:
            return None
        if self._node is None:
            self._node = Node(instance_id=new_instance_id(), operations=OPERATIONS, arena_dir=self.folder)
        try:
            told = (await self._node.connect(center.address).call(Ask(), deadline=1.0)).body
        except WireError:
            return None
        assert isinstance(told, Told)
        return told.view

    async def until_whole(self) -> View:
        """Wait until nothing is missing: all processes are members, every shard has its backup, a second center stands ready."""
        found: list[View] = []

        async def is_whole() -> bool:
            processes = self.processes()
            view = await self.view()
            if view is not None and self._is_whole(view, processes):
                found.append(view)
            return bool(found)

        await self.wait_for(is_whole, "the job to be whole")
        return found[0]

    def _is_whole(self, view: View, processes: dict[str, Process]) -> bool:
        members = {member.name for member in view if member.id not in self.killed}
        living = {name for name in processes if not name.startswith("center")}
        centers = [one for name, one in processes.items() if name.startswith("center")]
        assert self.folder is not None
        are_ready = all((self.folder / f"{one.name}-{one.instance_id}.sock").exists() for one in centers)
        are_safe = all(len(chain.backups) == self.backup and not chain.joining for chain in view.chains)
        is_full = len(view.servers) == NUM_SERVERS and len(view.workers) == NUM_WORKERS
        return is_full and members == living and len(centers) == NUM_CENTERS and are_ready and are_safe

    async def wait_for(self, condition: Callable, what: str) -> None:
        """Look again and again until something holds."""
        end = time.monotonic() + DEADLINE_SECONDS
        while not await condition():
            if self._process.poll() is not None or time.monotonic() > end:
                state = "the run ended" if self._process.poll() is not None else f"{DEADLINE_SECONDS:g} s went by"
                logs = [path.read_text()[-2000:] for path in sorted(self.run_dir.glob("logs/*.log"))]
                raise SystemExit(
                    "\n".join([*logs, self.output.read_text()[-3000:], f"{state} while waiting for {what}"])
                )
            await asyncio.sleep(LOOK_SECONDS)

    def stop(self) -> dict:
        """Stop it as a user would; its summary."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(timeout=DEADLINE_SECONDS)
        self.records.read()
        return json.loads((self.run_dir / "summary.json").read_text())


class Newcomer:
    """One more worker, that asks the center to be let in, is let in, takes no work, and leaves."""

    def __init__(self, job: ObservedJob) -> None:
        assert job.folder is not None
        recipe = validate(Recipe, read_toml(job.run_dir / "recipe.toml"), origin="the run's recipe")
        specs = describe_model(build_parts(recipe)[0])
        self._model = {name: (spec.shape, spec.dtype) for name, spec in specs.items()}
        self._settings = shared_settings(recipe)
        self._folder = job.folder
        self._contact: Contact | None = None

    def ask_to_join(self) -> None:
        """Begin to look for a center that lets it in."""
        self._node = Node(instance_id=new_instance_id(), operations=OPERATIONS, arena_dir=self._folder)
        self._contact = Contact(
            self._node, find=lambda: read_center(self._folder / "lease"), introduce=lambda view: self._join(view)
        )
        self._contact.start()

    def _join(self, view: View | None) -> Join:
        return Join(
            name="newcomer-9",
            role="worker",
            address="",
            model=self._model,
            view=view,
            settings=self._settings,
            started=time.time(),
        )

    @property
    def view(self) -> View | None:
        """The first view that it is in, or a later one; None while it is not let in."""
        assert self._contact is not None
        self._contact.check()
        view = self._contact.view
        return view if view is not None and view.find(self._node.instance_id) is not None else None

    async def leave(self) -> None:
        """Say goodbye."""
        assert self._contact is not None
        await self._contact.leave("it only came to see whether somebody is let in")
        await self._contact.stop()
        await self._node.close()


def train_undisturbed(folder: Path, steps: int) -> str:
    """The hash of the weights after so many steps of plain data parallelism, which shares no server, update log or center with
    this."""
    recipe = folder / "undisturbed.toml"
    recipe.write_text(RECIPE.format(backup=0, log="", steps=steps))
    command = [sys.executable, "-m", "shoal", "train", str(recipe), "--plan", "dp=2"]
    subprocess.run(
        [*command, "--run-dir", str(folder / "undisturbed")], env=environment(), check=True, stdout=sys.stderr
    )
    return json.loads((folder / "undisturbed" / "summary.json").read_text())["weights_sha256"]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
