"""One server or worker of a proof: the real role, with a recording of what it computes.

``python -m shoal.verify.servers.roles`` takes the place of ``shoal.serverrun.job.role`` in a job. Servers record every update
of every replica, workers say what each of their gradients was computed from; nothing of either is replaced, except by a mutant.
What the proof wants of them is in a file of the run directory.
"""

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor

from shoal.comm.world import World
from shoal.core.errors import RunError
from shoal.core.place import Place
from shoal.paramserver.records import PushRecord, Read, Update, WorkUnit
from shoal.paramserver.server.shard import ShardState
from shoal.serverrun.process import ProcessSpec, run_process
from shoal.serverrun.server.process import serve
from shoal.serverrun.server.source import ShardSource
from shoal.serverrun.worker.connection import ServerConnection, Worker
from shoal.serverrun.worker.process import work
from shoal.verify.mutants.catalogue import MUTANTS, planted
from shoal.verify.mutants.mutant import Death
from shoal.verify.reference.recording import placement_values

UPDATES, READS = "update", "read"
"""How the files of servers and of workers begin."""
_JOB = "proof.json"
_MEET_SECONDS = 120.0
_LOOK_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True)
class ServerJob:
    """What a proof wants of the roles."""

    folder: Path
    """Where recordings go."""
    steps: int
    mutant: str | None
    deaths: Sequence[Death] = ()

    def write(self, run_dir: Path) -> None:
        """Put it where the roles look."""
        (run_dir / _JOB).write_text(json.dumps({**asdict(self), "folder": str(self.folder)}))

    @classmethod
    def read(cls, run_dir: Path) -> "ServerJob":
        """Back from ``write``."""
        values = json.loads((run_dir / _JOB).read_text())
        deaths = [Death(*death) for death in values.pop("deaths")]
        return cls(**{**values, "folder": Path(values["folder"]), "deaths": deaths})


class RecordedSource(ShardSource):
    """Shards that record each of their updates, in a run that ends after the proof's steps."""

    def __init__(self, spec: ProcessSpec, job: ServerJob) -> None:
        super().__init__(spec)
        self.num_steps = min(job.steps, self.total_steps)
        self._job = job

    def make_copy(self, number: int) -> ShardState:
        """As the run makes it, with an eye on it."""
        state = super().make_copy(number)
        state.on_update = lambda record, gradients: self._record(state, record, gradients)
        return state

    def _record(self, state: ShardState, record: Update, gradients: Mapping[str, Tensor]) -> None:
        tensors = {f"grad/{name}": gradient for name, gradient in gradients.items()}
        tensors |= {f"weight/{name}": tensor for name, tensor in state.parameters().items()}
        tensors |= {f"optimizer/{path}": tensor for path, tensor in state.optimizer_state().items()}
        shard, spec = state.shard.number, self.spec
        stem = f"{UPDATES}-{spec.name}-{spec.instance_id}-{shard}-{record.number}"
        # Copies: the live tensors are views of one buffer, and safetensors refuses two names for one memory.
        plain = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
        save_file(plain, self._job.folder / f"{stem}.safetensors")
        page = {
            "server": spec.name,
            "instance_id": spec.instance_id,
            "shard": shard,
            "update": msgspec.to_builtins(record),
            "pieces": [[piece.name, piece.start, piece.stop, shard] for piece in state.shard.pieces],
            "placements": {name: placement_values(where) for name, where in state.placements().items()},
        }
        _write_whole(self._job.folder / f"{stem}.json", page)
        self._die_if_due(record.number)

    def _die_if_due(self, number: int) -> None:
        """A death that the proof wants: at once and without a word, as a machine dies."""
        for death in self._job.deaths:
            mark = self._job.folder / f"died-{death.name}-{death.after}"
            if death == (self.spec.name, number) and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)


class RecordedConnection(ServerConnection):
    """A worker's connection that says which versions of the shards every gradient was computed from."""

    def __init__(self, spec: ProcessSpec, worker: Worker, landing: Tensor | None, job: ServerJob) -> None:
        super().__init__(spec, worker, landing)
        self._job = job
        self._num_handed_in = 0
        self._works: list[dict[str, Any]] = []
        self._base: list[int] = []
        self._meet(spec)

    def _meet(self, spec: ProcessSpec) -> None:
        """Begin when all workers are there: a run that one of them did alone would prove little about several.

        Raises:
            RunError: one of them does not come.
        """
        (self._job.folder / f"ready-{spec.name}").touch()
        until = time.monotonic() + _MEET_SECONDS
        names = [f"worker-{index}" for index in range(spec.plan.num_shares)]
        while missing := [name for name in names if not (self._job.folder / f"ready-{name}").exists()]:
            if time.monotonic() > until:
                raise RunError(f"{spec.name} waited {_MEET_SECONDS:g} s for {', '.join(missing)} to be ready")
            time.sleep(_LOOK_SECONDS)

    def given(self, asked: "Future[WorkUnit | None]") -> WorkUnit | None:
        """As the run does it; not when it is asked for, which may be before the work unit that is being computed is handed in."""
        unit = super().given(asked)
        if unit is not None:
            self._works.append({"unit": unit.number, "read": None})
        return unit

    def pull(self, need: int, bound: int | None = None) -> Read:
        """As the run does it; what is pulled is for the work unit that was taken last."""
        read = super().pull(need, bound)
        self._note_read()
        return read

    def use(self, read: Read) -> None:
        """As the run does it; these were pulled before the work unit was taken."""
        super().use(read)
        self._works[-1]["read"] = list(read)

    async def _fetch(self, unit: WorkUnit, land: Callable[[Tensor, Read], object]) -> None:
        await super()._fetch(unit, land)
        self._note_read()

    def _note_read(self) -> None:
        if self._works:
            self._works[-1]["read"] = list(self.client.versions)

    def hand_in(self, gradient: Tensor, push: PushRecord, read: Read) -> "Future[bool]":
        """As the run does it, after recording what the gradient was computed from."""
        number, self._num_handed_in = self._num_handed_in, self._num_handed_in + 1
        works, self._works = self._works, []
        page = {
            **msgspec.structs.asdict(push),
            "number": number,
            "index": self._spec.index,
            "works": works,
            "versions": works[0]["read"] or self._base,
        }
        self._base = next((work["read"] for work in reversed(works) if work["read"]), self._base)
        _write_whole(self._job.folder / f"{READS}-{push.worker}-{number}.json", page)
        return super().hand_in(gradient, push, read)


def run_recorded(role: str, spec: ProcessSpec) -> None:
    """Do a role's work to its end, under a mutant if the proof plants one."""
    job = ServerJob.read(spec.kept_dir)
    mutant = MUTANTS[job.mutant] if job.mutant else None
    world = World(Place(rank=spec.rank, world_size=spec.num_ranks), device=torch.device("cpu"), deadline_seconds=0.0)
    with planted(mutant, world):
        if role == "server":
            asyncio.run(serve(spec, make_source=lambda own: RecordedSource(own, job)))
        else:
            work(spec, lambda own, worker, landing: RecordedConnection(own, worker, landing, job))


def _write_whole(path: Path, page: Mapping[str, Any]) -> None:
    """A page that is there only when it is all there: its writer may be killed."""
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(page))
    beside.rename(path)


def main() -> None:
    """Entry point of a role of a proof."""
    run_process(run_recorded)


if __name__ == "__main__":
    main()
