"""A run of parameter servers for a proof: the job that runs it, and the recordings of its servers and workers, read back.

Every replica of a shard recorded every update that it made, backups too, and replicas that came later from where they came in. A
update is put together from all of them: each shard from the first that has it, every other copy compared with that one.
"""

import asyncio
import json
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from shoal.core.errors import EXIT_DONE, RunError
from shoal.core.plan import Plan
from shoal.serverrun.job.job import Job, JobRequest, JobResult
from shoal.telemetry.statusboard import StatusReading
from shoal.trainer.claim import Claim
from shoal.trainer.config import Recipe
from shoal.verify.compare.assemble import AssembledStep, RankPiece, assemble, placement_of
from shoal.verify.compare.diagnose import RankGrid
from shoal.verify.mutants.mutant import Death
from shoal.verify.reference.model import norm_of
from shoal.verify.reference.recording import Step
from shoal.verify.servers.roles import READS, UPDATES, ServerJob
from shoal.verify.servers.rules import Part, Update, Work

_STOP_SECONDS = 5.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, kw_only=True)
class ReplicaRecording:
    """The recording of one copy of one shard."""

    server: str
    instance_id: str
    shard: int
    pages: Mapping[int, Mapping[str, Any]]
    """By update."""
    folder: Path

    @property
    def name(self) -> str:
        """What reports call it."""
        return f"shard {self.shard} on {self.server}"

    def pieces(self, number: int, rank: int) -> dict[str, RankPiece]:
        """What it held after an update."""
        stem = f"{UPDATES}-{self.server}-{self.instance_id}-{self.shard}-{number}"
        table = self.pages[number]["placements"]
        tensors = load_file(self.folder / f"{stem}.safetensors")
        return {
            key: RankPiece(rank=rank, local=local, placement=placement_of(key, local, table))
            for key, local in tensors.items()
        }


@dataclass(frozen=True, kw_only=True)
class ServerRun:
    """A run of parameter servers as it was recorded."""

    updates: tuple[Update, ...]
    pieces: tuple[tuple[str, int, int, int], ...]
    """Every slice of a parameter: name, first and last element, shard."""
    replicas: tuple[ReplicaRecording, ...]

    def gather(self, number: int) -> AssembledStep:
        """One update, with whole tensors."""
        pieces: dict[str, list[RankPiece]] = {}
        for rank, replica in enumerate(self.replicas):
            if number in replica.pages:
                for key, piece in replica.pieces(number, rank).items():
                    pieces.setdefault(key, []).append(piece)
        wholes, disagreeing = assemble(pieces)
        # Servers need no norm, so it is taken of what they hold.
        norm = norm_of([wholes[key] for key in sorted(wholes) if key.startswith("grad/")])
        step = Step(loss=self.updates[number].loss, norm=norm, skipped=False, tensors=wholes)
        return AssembledStep(
            step=step, pieces={key: tuple(found) for key, found in pieces.items()}, disagreeing=disagreeing
        )

    def describe(self) -> str:
        """Its log in a few words."""
        ages = [number - part.version for number, update in enumerate(self.updates) for part in update.parts]
        late = sum(age > 0 for age in ages)
        return f"a log of {len(self.updates)} updates, {late} of {len(ages)} gradients late by up to {max(ages)}"

    def layout(self, plan: Plan) -> RankGrid:
        """Who is who in reports."""
        return RankGrid(
            degrees={"workers": plan.num_shares, "microbatches": plan.microbatches or 1},
            coordinates=[{"workers": 0}] * len(self.replicas),
            names=[replica.name for replica in self.replicas],
        )


class Quiet:
    """A display that shows nothing and keeps the lines that it is given."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def update(self, states: Sequence[StatusReading]) -> None:
        """Nobody looks."""

    def message(self, text: str) -> None:
        """Remember it, for an error."""
        self.lines.append(text)

    def close(self) -> None:
        """Nothing to put in order."""


def run_servers(
    recipe: Recipe,
    plan: Plan,
    *,
    steps: int,
    mutant: str | None,
    deaths: Sequence[Death],
    folder: Path,
    threads: int,
    deadline_seconds: float,
) -> ServerRun:
    """Run a plan with real servers, workers and a center for some steps, and read what they recorded.

    Raises:
        RunError: it did not come to its end, or what was recorded does not fit together; says where.
    """
    run_dir, records = folder / "run", folder / "records"
    records.mkdir()
    # What a proof needs no more than once, or not at all.
    changes = {
        "plan": str(plan),
        "checkpoint": recipe.checkpoint.model_copy(update={"every": 0}),
        "eval": recipe.eval.model_copy(update={"every": 0}),
        "train": recipe.train.model_copy(update={"threads": threads}),
        "telemetry": recipe.telemetry.model_copy(update={"tensorboard": False}),
        "paramserver": recipe.paramserver.model_copy(update={"centers": 1}),
    }
    claim = Claim(run_dir)
    try:
        claim.write(recipe.model_copy(update=changes), plan)
        ServerJob(folder=records, steps=steps, mutant=mutant, deaths=tuple(deaths)).write(run_dir)
        display = Quiet()
        request = JobRequest(
            run_dir=run_dir,
            num_servers=plan.ps,
            num_workers=plan.num_shares,
            ranks_per_worker=plan.ranks_per_replica,
            # Nobody is stopped in a proof, and on a busy machine a rank may be silent for long.
            dead_seconds=deadline_seconds,
            num_centers=1,
            threads=threads,
            resume=False,
            max_respawns=len(deaths),
            stop_grace=_STOP_SECONDS,
            display=display,
            closing=None,
            member_module="shoal.verify.servers.roles",
        )
        end = _run(request, deadline_seconds)
    finally:
        claim.release()
    if end.exit_code != EXIT_DONE:
        # Who died, and the last line that it wrote; its log is gone with the folder.
        first, *tail = [line for line in end.cause.splitlines() if not line.startswith("its log: ")]
        raise RunError(": ".join(["it did not come to its end", first.rstrip(":"), *tail[-1:]]))
    if end.num_deaths != len(deaths):
        raise RunError(f"{end.num_deaths} processes died, and {len(deaths)} were to: {'; '.join(display.lines)}")
    return read_run(records, num_shards=plan.ps)


def _run(request: JobRequest, deadline_seconds: float) -> JobResult:
    """Run a job, and leave the handling of signals as it was found: a job takes it over and gives none back."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}

    async def go() -> JobResult:
        return await asyncio.wait_for(Job(request).run(), deadline_seconds)

    try:
        end = asyncio.run(go())
    except TimeoutError as error:
        raise RunError(f"servers and workers were not done within {deadline_seconds:g} s") from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if end.signal is not None:
        # It was meant for the whole proof.
        os.kill(os.getpid(), end.signal)
    return end


def read_run(folder: Path, *, num_shards: int) -> ServerRun:
    """The recordings of servers and workers in a folder.

    Raises:
        RunError: two servers applied different records, one was not recorded, or a gradient has no worker who computed it.
    """
    replicas = _read_replicas(folder)
    records: dict[int, tuple[str, Mapping[str, Any]]] = {}
    for replica in replicas:
        for number, page in replica.pages.items():
            name, known = records.setdefault(number, (replica.name, page["update"]))
            if page["update"] != known:
                raise RunError(f"update {number + 1} is not the same in {name} and in {replica.name}")
    for number in range(max(records, default=0) + 1):
        held = {replica.shard for replica in replicas if number in replica.pages}
        for shard in sorted(set(range(num_shards)) - held):
            raise RunError(f"no server recorded update {number + 1} of shard {shard}")
    reads = {}
    for path in sorted(folder.glob(f"{READS}-*.json")):
        page = json.loads(path.read_text())
        reads[page["worker"], page["number"]] = page
    updates = tuple(_update(records[number][1], reads) for number in sorted(records))
    first = {replica.shard: next(iter(replica.pages.values())) for replica in reversed(replicas)}
    pieces = tuple(tuple(piece) for shard in sorted(first) for piece in first[shard]["pieces"])
    return ServerRun(updates=updates, pieces=pieces, replicas=replicas)


def _read_replicas(folder: Path) -> tuple[ReplicaRecording, ...]:
    """Every copy of every shard; of each shard those with the most updates first."""
    found: dict[tuple[str, str, int], dict[int, Mapping[str, Any]]] = {}
    for path in sorted(folder.glob(f"{UPDATES}-*.json")):
        page = json.loads(path.read_text())
        key = (page["server"], page["instance_id"], page["shard"])
        found.setdefault(key, {})[page["update"]["number"]] = page
    replicas = [
        ReplicaRecording(server=server, instance_id=instance_id, shard=shard, pages=pages, folder=folder)
        for (server, instance_id, shard), pages in found.items()
    ]
    return tuple(sorted(replicas, key=lambda one: (one.shard, -len(one.pages), one.server, one.instance_id)))


def _update(record: Mapping[str, Any], reads: Mapping[tuple[str, int], Mapping[str, Any]]) -> Update:
    parts = []
    for worker, number, factor in record["entries"]:
        page = reads.get((worker, number))
        if page is None:
            raise RunError(f"update {record['number'] + 1} has gradient {number} of {worker}, which no worker computed")
        works = [Work(unit=work["unit"], read=tuple(work["read"]) if work["read"] else None) for work in page["works"]]
        if sorted(work.unit for work in works) != page["units"]:
            raise RunError(f"{worker} says that gradient {number} has work units {page['units']}, and computed {works}")
        parts.append(
            Part(
                worker=worker,
                index=page["index"],
                works=tuple(works),
                versions=tuple(page["versions"]),
                claimed=page["version"],
                factor=factor,
                samples=page["samples"],
            )
        )
    return Update(parts=tuple(parts), loss=record["loss"])
