"""Checkpoints of a script's own run: all its models, optimizers, schedulers, loaders and random states, under one vote.

Tensors are named as in every checkpoint (``weights/<name>``, ``optimizer/<parameter>/<key>``). Those of a second model have its
name before them: ``weights/generator.<name>``. What is no tensor is JSON in the manifest, so loading one never runs code.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shoal.checkpoint.agreement import agree_on_failure
from shoal.checkpoint.config import CheckpointConfig
from shoal.checkpoint.places.address import check_address
from shoal.checkpoint.places.opening import open_storage
from shoal.checkpoint.places.storage import Brought
from shoal.checkpoint.reader import read, read_local
from shoal.checkpoint.saver import open_saver
from shoal.comm.world import World
from shoal.core.errors import RunError, ShoalError
from shoal.core.events import CheckpointFailed, CheckpointRefused, Event
from shoal.core.rundir import RunDir
from shoal.data.streams.statevalues import decode_state, encode_state
from shoal.engine.hooks import without_missing
from shoal.engine.reporting import Reporter
from shoal.engine.state import (
    RankState,
    export_random_state,
    import_random_state,
    load_rank_state,
    refuse_other_state,
    seed_process,
)
from shoal.library.setups import ModelSetup
from shoal.optim.precision import LossScale

_KEY = "run"
"""Of the manifest's values: what a script's own run keeps beside tensors."""
_MEMBERS = ("params", "param_names")


class RunCheckpoints:
    """Saves and restores a run.

    Args:
        run_dir: of the run.
        config: which are kept.
        world: the ranks.
        reporter: told of what is saved and what is refused.
        plan: the resolved plan's line.
        replica: this rank's.
        seed: of the run.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        config: CheckpointConfig,
        world: World,
        reporter: Reporter,
        plan: str,
        replica: int,
        seed: int,
    ) -> None:
        self.root = RunDir(run_dir).checkpoints
        self._saved: str | None = None
        """All but tensors of what was saved last: equal counts of updates everywhere mean equal tensors."""
        self.failure: str | None = None
        self._world, self._reporter, self._plan = world, reporter, plan
        self._replica, self._seed = replica, seed
        if config.address is not None:
            check_address(config.address, world.size)
        opened = open_storage(self.root, world=world, config=config)
        reporter.tell(*filter(None, [opened.said]))
        self._storage = opened.storage
        self._saver = open_saver(
            self.root,
            world=world,
            config=config,
            plan=plan,
            report=self._report,
            settle=reporter.flush,
            storage=self._storage,
        )

    def _report(self, event: Event) -> None:
        self._reporter.event(event)
        if isinstance(event, CheckpointFailed):
            self.failure, self._saved = event.reason, None
            self._reporter.warn(f"checkpoint at step {event.step} was not saved: {event.reason}; training goes on")
        else:
            self.failure = None

    @property
    def is_empty(self) -> bool:
        """True when no run has saved here before."""
        return self._storage.is_empty

    def save(self, step: int, state: RankState, values: Mapping[str, Any]) -> bool:
        """Copy the state and begin to write it; False for one that is saved already, with all that belongs to it."""
        text = encode_state(dict(values), origin="the run")
        if text == self._saved:
            self.wait()  # It may be failing just now, of which ranks would hear at different times.
            if text == self._saved:
                return False
        self._saved = text
        kept = {_KEY: text}
        random = export_random_state(self._world.rank)
        self._saver.save(step, state.tensors, kept, random, placements=state.placements)
        return True

    def keep(self, steps: Collection[int]) -> None:
        """Let the checkpoints of these steps not expire, in place of those that were named before."""
        self._saver.kept = frozenset(steps)

    def take(self, step: int) -> None:
        """Step number ``step`` was taken, so what was saved before it is good."""
        self._saver.take(step)

    def wait(self) -> None:
        """Wait until what was begun is committed or has failed, on every rank."""
        self._saver.wait()

    def close(self) -> None:
        """Stop the writer."""
        self._saver.close()

    def restore(
        self,
        state: RankState,
        load: Callable[[dict[str, Any]], None],
        *,
        named: Callable[[RankState, Collection[str]], RankState] | None = None,
    ) -> str | None:
        """Load the newest whole checkpoint into the live tensors, and give its values to ``load``; None where there is none.

        Args:
            state: the live tensors.
            load: takes the values.
            named: gives the tensors the names that they have in a checkpoint with these ones.

        Raises:
            RunError: a rank cannot read it, or it does not fit this run. All ranks raise together.
        """
        brought = self._storage.bring(self._world, None)
        for name, reason in brought.refused if self._world.is_first else ():
            self._reporter.event(CheckpointRefused(path=f"{self._storage.where}/{name}", reason=reason))
            self._reporter.warn(f"checkpoint {name} is not whole and is passed over: {reason}")
        if brought.path is None:
            return None
        problem = ""
        try:
            try:
                self._load(brought, state, load, named)
            except (OSError, ShoalError) as error:
                problem = f"rank {self._world.rank} cannot go on from {brought.name}: {error}"
            if said := agree_on_failure(self._world, problem, where=brought.name):
                raise RunError(said)
        finally:
            self._storage.give_back(brought)
        return brought.name

    def _load(
        self,
        brought: Brought,
        state: RankState,
        load: Callable[[dict[str, Any]], None],
        named: Callable[[RankState, Collection[str]], RankState] | None,
    ) -> None:
        path, manifest = brought.path, brought.manifest
        assert path is not None, "nothing is loaded where nothing was brought"
        prefix = f"rng/rank-{self._world.rank:03d}/"
        checkpoint = read(path, wanted=lambda name: name.startswith(prefix), expect=manifest)
        kept = checkpoint.values.get(_KEY)
        if not isinstance(kept, str):
            raise RunError("it was not saved by a script's own run (shoal.Run)")
        refuse_other_state(
            without_missing(state, checkpoint.manifest.tensors), checkpoint.manifest.tensors, origin=brought.name
        )
        state = state if named is None else named(state, set(checkpoint.manifest.tensors))
        state = without_missing(state, checkpoint.manifest.tensors)
        load_rank_state(state, read_local(path, state.placements, expect=manifest), origin=brought.name)
        load(decode_state(kept))
        # Under another plan a rank's number means another replica, and the ranks that share one must draw alike.
        is_same_plan = checkpoint.manifest.plan == self._plan
        if not (is_same_plan and import_random_state(checkpoint.tensors, self._world.rank)):
            seed_process(self._seed + checkpoint.step, rank=self._replica)
        self._saved = kept


def merge_states(setups: list[ModelSetup], *, to_save: bool = False) -> RankState:
    """The state of all models of a run on this rank, each under its own name.

    Args:
        setups: of the models.
        to_save: as a checkpoint keeps it, which all ranks find out together; else the live tensors.
    """
    tensors: dict[str, Any] = {}
    placements: dict[str, Any] = {}
    weights: set[str] = set()
    has_updates = True
    for own in setups:
        state = own.engine.state_to_save(own.num_updates) if to_save else own.engine.state(own.num_updates)
        tensors |= {_labelled(name, own.label): tensor for name, tensor in state.tensors.items()}
        placements |= {_labelled(name, own.label): one for name, one in state.placements.items()}
        weights |= {_labelled(name, own.label) for name in state.all_weights}
        # A rank without a row of one model cannot know which state that one's optimizer would have.
        has_updates = has_updates and state.has_updates
    return RankState(tensors=tensors, placements=placements, all_weights=frozenset(weights), has_updates=has_updates)


def _labelled(name: str, label: str) -> str:
    kind, _, rest = name.partition("/")
    return f"{kind}/{label}.{rest}" if label else name


def export_setup(own: ModelSetup) -> dict[str, Any]:
    """What a model's setup keeps beside tensors: counts, the groups' values and the schedulers."""
    groups = [
        {key: value for key, value in group.items() if key not in _MEMBERS} for group in own.optimizer.param_groups
    ]
    return {
        "label": own.label,
        "passes": own.num_passes,
        "updates": own.num_updates,
        "last_loss": own.last_loss,
        "loss_scale": asdict(own.loss_scale),
        "groups": groups,
        "schedulers": [scheduler.state_dict() for scheduler in own.schedulers],
        "hooks": own.engine.hooks.state(),
    }


def import_setup(own: ModelSetup, kept: Mapping[str, Any]) -> None:
    """Put back what ``export_setup`` took.

    Raises:
        RunError: it is of another model, or of other groups or schedulers.
    """
    theirs = (kept["label"], len(kept["groups"]), len(kept["schedulers"]))
    ours = (own.label, len(own.optimizer.param_groups), len(own.schedulers))
    if theirs != ours:
        raise RunError(
            f"it has model {theirs[0]!r} with {theirs[1]} groups and {theirs[2]} schedulers, and this run sets up model "
            f"{ours[0]!r} with {ours[1]} and {ours[2]}; set them up as the run that saved it did"
        )
    own.num_passes, own.num_updates = int(kept["passes"]), int(kept["updates"])
    own.passes_at_update = own.num_passes
    own.last_loss = kept["last_loss"]
    if own.engine.precision.scales_loss and "loss_scale" in kept:
        own.loss_scale = LossScale(**kept["loss_scale"])
    for group, values in zip(own.optimizer.param_groups, kept["groups"], strict=True):
        group.update(values)
    for scheduler, values in zip(own.schedulers, kept["schedulers"], strict=True):
        scheduler.load_state_dict(values)
    own.engine.hooks.load_state(kept.get("hooks", {}))
