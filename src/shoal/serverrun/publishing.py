"""Publishes the model of a run with parameter servers while it trains: a process beside the roles, without a part of the run.

No role has the whole model and no step is taken by all together, so what is published is a checkpoint: the newest whole one,
whenever it is time, if its loss on the held-back window is no worse than the last published version's allows. It may be killed
at any moment: a version is whole or absent, and whoever comes next reads from the last one what it needs to go on.
"""

import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from shoal.checkpoint.pieces import as_blob
from shoal.checkpoint.published.version import Version
from shoal.checkpoint.published.versions import clear_drafts, publish, read_newest
from shoal.checkpoint.whole import committed_names
from shoal.comm.mesh import build_mesh
from shoal.comm.world import World
from shoal.core.errors import ShoalError
from shoal.core.events import Event, Published, RefreshRefused
from shoal.core.place import Place
from shoal.core.plan import Plan
from shoal.core.rundir import RunDir
from shoal.data.fitted import FOLDER
from shoal.data.rawrows import read_preparation
from shoal.engine.evaluate import evaluate
from shoal.engine.resolve import default_threads
from shoal.engine.state import hash_weights_of, named_weights
from shoal.serverrun.notices import read_events
from shoal.telemetry.eventlog import EventLog
from shoal.trainer.build import LoadedRun, load_run
from shoal.trainer.online.config import PublishConfig
from shoal.trainer.online.gate import judge
from shoal.trainer.online.publisher import NewestRows, describe_inputs, hash_window

_LOOK_SECONDS = 0.2


def is_due(config: PublishConfig, step: int, last: Version | None, *, judged: int, now: float) -> bool:
    """Whether the checkpoint of a step is to be judged.

    Args:
        config: of the recipe.
        step: of the newest checkpoint.
        last: the newest version; None where nothing was published.
        judged: step of the checkpoint that was judged last; -1 for none.
        now: seconds since 1970.
    """
    before = judged if last is None else max(judged, last.step)
    if step <= before:
        return False
    if config.every_steps is not None:
        return step // config.every_steps > max(before, 0) // config.every_steps
    assert config.every_minutes is not None
    return last is None or now - last.published >= 60 * config.every_minutes


class CheckpointPublisher:
    """Looks for checkpoints of a run and publishes them.

    Args:
        run_dir: of the run.
        events: takes what is said of it.
    """

    def __init__(self, run_dir: Path, events: EventLog) -> None:
        self._run, self._events = RunDir(run_dir), events
        self._judged = -1
        clear_drafts(self._run.published)

    def look(self, config: PublishConfig) -> None:
        """Judge the newest checkpoint where it is time.

        Raises:
            ShoalError: it cannot be read.
            OSError: the disk refused.
        """
        found = committed_names(self._run.checkpoints)
        if found and is_due(
            config, found[0][0], read_newest(self._run.published), judged=self._judged, now=time.time()
        ):
            self.refresh(load_run(self._run.root))

    def refresh(self, run: LoadedRun) -> None:
        """Publish the weights of a run that was loaded, or say why not."""
        started, config = time.perf_counter(), run.recipe.publish
        assert run.data.validation is not None, "checked before the run began"
        held_back = NewestRows(run.data.validation, config.holdback)
        world = World(Place(), device=torch.device("cpu"), deadline_seconds=60.0)
        batch = run.recipe.eval.batch or run.recipe.train.micro_batch or run.recipe.train.global_batch
        mesh = build_mesh(world, Plan(dp=1))
        loss = evaluate(run.objective, held_back, split="holdback", mesh=mesh, batch=batch).loss
        newest, window = read_newest(self._run.published), hash_window(held_back)
        last = newest.loss if newest is not None and newest.window == window else None
        self._judged = run.step
        decision = judge(loss, last, config.bound)
        if not decision.is_good:
            self._say(
                RefreshRefused(step=run.step, loss=loss, last_loss=last, limit=decision.limit, reason=decision.reason)
            )
            print(f"step {run.step}: the model was not published: {decision.reason}", file=sys.stderr, flush=True)
            return
        weights = {name: tensor.detach().contiguous() for name, tensor in named_weights(run.model).items()}
        inputs, is_keyed = describe_inputs(run.model, run.example_inputs, run.data.spec)
        version = Version(
            number=0,
            step=run.step,
            weights_sha256=hash_weights_of(weights.items()),
            data_version=0,
            loss=loss,
            window=window,
            window_samples=len(held_back),
            published=time.time(),
            spec=asdict(run.data.spec),
            inputs=inputs,
            is_keyed=is_keyed,
        )
        version = publish(
            self._run.published,
            version,
            {name: as_blob(tensor) for name, tensor in weights.items()},
            self._run.recipe.read_bytes(),
            keep=config.keep,
            beside=read_preparation(self._run.root / FOLDER),
        )
        self._say(
            Published(
                step=run.step,
                version=version.number,
                loss=loss,
                last_loss=last,
                weights_sha256=version.weights_sha256,
                data_version=0,
                seconds=time.perf_counter() - started,
            )
        )

    def _say(self, event: Event) -> None:
        self._events.write(event)
        self._events.flush()  # Others look at a version at once.


def publish_last(run: LoadedRun, rank: int) -> dict[str, int]:
    """Judge the last checkpoint of a run that has ended, which nobody may have come to; how many versions there were in all.

    Raises:
        OSError: the disk refused.
    """
    events = EventLog(run.run_dir, rank)
    try:
        CheckpointPublisher(run.run_dir, events).look(run.recipe.publish)
    finally:
        events.close()
    told = list(read_events(run.run_dir, Published.kind, RefreshRefused.kind))
    published = sum(event["kind"] == Published.kind for event in told)
    return {"published": published, "refused": len(told) - published}


def main() -> None:
    """Entry point: ``shoal.serverrun.publishing RUN_DIR RANK``, until it is ended."""
    run_dir, rank = Path(sys.argv[1]), int(sys.argv[2])
    os.nice(5)  # The run comes first.
    events = EventLog(run_dir, rank)
    publisher: CheckpointPublisher | None = None
    refused = ""
    while True:
        time.sleep(_LOOK_SECONDS)
        try:
            if not committed_names(RunDir(run_dir).checkpoints):
                continue
            publisher = publisher or CheckpointPublisher(run_dir, events)
            recipe = load_run(run_dir).recipe
            torch.set_num_threads(recipe.train.threads or default_threads(1))
            while True:
                publisher.look(recipe.publish)
                time.sleep(_LOOK_SECONDS)
        except (ShoalError, OSError) as error:
            # A checkpoint may expire between the listing and the read, and a disk may be full for a while.
            if str(error) != refused:
                print(f"not published: {error}", file=sys.stderr, flush=True)
            refused = str(error)


if __name__ == "__main__":
    main()
