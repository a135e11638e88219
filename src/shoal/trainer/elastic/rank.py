"""A rank of a run that goes on when others die (``elastic.mode = "shrink"``): the same process under one view after another.

    warm up, say so
    for each view that has this process in it:
        come to it, when every group of the view before is left      all members of the view meet under its epoch
        lay the model out for those who are present
        agree on the newest step that is whole in somebody's memory, and fetch what lacks of its state
        train, until the run is over, a collective fails, or there is a newer view

A process that died is told of by the supervisor, within milliseconds; one that only waits for it finds that out by itself, or
from the newer view. Whatever went wrong, the way on is the same: leave all groups, keep what is in memory, and wait for the next
view.
No checkpoint is read, unless nothing whole is left in memory.
"""

import contextlib
import gc
import json
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store  # torch types these names only there

from shoal.comm.channel import PeerLost
from shoal.comm.interruption import interrupt_when
from shoal.comm.leaving.connections import shut_connections
from shoal.comm.leaving.hangup import HangUp
from shoal.comm.store.agentstore import AgentStore
from shoal.comm.store.recordfile import RecordFileStore
from shoal.comm.world import World, join_world
from shoal.core.clock import Deadline
from shoal.core.errors import FinalError, RequestError, RunError
from shoal.core.events import Resumed
from shoal.core.place import Place
from shoal.data.build import build_splits
from shoal.data.source import Splits, Streamed
from shoal.engine.callbacks.build import build_callbacks
from shoal.engine.hooks import Hook
from shoal.engine.model import ParallelModel
from shoal.engine.resolve import RunSetup
from shoal.engine.stop import StopRequest
from shoal.launch.failures import is_peer_failure
from shoal.launch.group.control import ControlBoard
from shoal.launch.group.elastic import CONTROL_VARIABLE, MEMBER_VARIABLE
from shoal.telemetry.statusboard import RankStatus
from shoal.trainer import sharedmodel
from shoal.trainer.build import build_seeded, build_trainer, load_init
from shoal.trainer.config import Recipe
from shoal.trainer.elastic.limits import FIX
from shoal.trainer.elastic.pacing import PaceMeter
from shoal.trainer.elastic.peercopies import PeerCopies, own_shard
from shoal.trainer.elastic.recovery import MemberState, agree, counted, fetch_state
from shoal.trainer.elastic.suspects import Answering, addresses_of, find_suspect, own_ip
from shoal.trainer.loop import Trainer
from shoal.trainer.samedata import gather_texts

_ARRIVE_SECONDS = 60.0
"""How long members of a view wait for one that is alive and does not come; those that died are told of."""
_LOOK_SECONDS = 0.002
_MEET_SECONDS = 0.02
_KEPT_STORES = 64
_CONNECT_SECONDS = 5.0
"""How much longer than a lease ranks of several hosts may take to connect."""


@dataclass(frozen=True, kw_only=True)
class View:
    """A view as it stands on the control board."""

    epoch: int
    members: tuple[str, ...]
    """In the order of ranks."""
    slots: tuple[int, ...]
    num_replicas: int
    num_logical: int
    store: str
    """Empty where members are on several hosts, and meet at the agents of these."""
    hosts: tuple[str, ...]
    """Of each replica."""
    cause: str
    is_retry: bool = False

    @classmethod
    def parse(cls, text: str) -> "View":
        """Of what the supervisor wrote."""
        values = json.loads(text)
        return cls(**{**values, **{name: tuple(values[name]) for name in ("members", "slots", "hosts")}})

    @property
    def has_hosts(self) -> bool:
        """Whether members may be on several hosts."""
        return not self.store


def is_elastic(environment: Mapping[str, str]) -> bool:
    """True in a process that a supervisor started as a member of an elastic group."""
    return CONTROL_VARIABLE in environment


class ElasticRank:
    """One process of an elastic run.

    Args:
        recipe: of the run.
        setup: what was resolved of it.
        run_dir: where it writes.
        resume: go on from a checkpoint at the start.
        place: what the launcher told this process.
        environment: its variables.
        rank_status: where the supervisor looks.
        stop: this process's request to stop.
    """

    def __init__(
        self,
        recipe: Recipe,
        setup: RunSetup,
        run_dir: Path,
        *,
        resume: bool,
        place: Place,
        environment: Mapping[str, str],
        rank_status: RankStatus | None,
        stop: StopRequest,
    ) -> None:
        self._recipe, self._setup, self._run_dir, self._resume = recipe, setup, run_dir, resume
        self._place, self._status, self._stop = place, rank_status, stop
        self._slot, self.member = place.rank, environment[MEMBER_VARIABLE]
        self._control = ControlBoard.attach(int(environment[CONTROL_VARIABLE]), place.world_size)
        self._epoch = 0
        self._held = MemberState(member=self.member)
        self._left_at: float | None = None
        """When this rank noticed that it has to leave; None while it trains, and in a newcomer."""
        self._was_in_step = False
        self._copies: PeerCopies | None = None
        self._before: MemberState | None = None
        """What this rank held before the present view, while not everybody is known to have the state of it."""
        self._data: Splits | None = None
        self._hooks: Sequence[Hook] | None = None
        """Built and not used yet."""
        self._meter = PaceMeter(lambda pace: self._control.say_pace(self._slot, pace))
        self._address = own_ip()
        self._suspects: dict[str, int] = {}
        """By address, the slots of a host's ranks: one of them, where no other host has it."""
        self._answering = Answering()
        self._updating = -1
        self._hang_up: HangUp | None = None
        # A store that is written in Python lives only as long as Python refers to it, and a thread that still connects to those
        # of an old view may use its one until the time for that is over.
        self._stores: deque[Store] = deque(maxlen=_KEPT_STORES)

    @property
    def counts(self) -> dict[str, float]:
        """What became of the run's views, for the summary."""
        return dict(self._held.counts)

    @contextlib.contextmanager
    def taking_part(self) -> Iterator["ElasticRank"]:
        """Build what can be built alone, and say that this process is there."""
        self._enter("building model and data")
        self._data = build_splits(self._recipe.data, self._recipe.train.seed)
        self._hooks = build_callbacks(self._recipe.callbacks)
        self._control.say_ready(self._slot)
        with interrupt_when(self._why_stop_waiting):
            yield self

    def views(self) -> Iterator[View]:
        """Every view that has this process in it, one after the other.

        Raises:
            RunError: there is none in time, though this process took part before; or it was left out.
        """
        while True:
            self._enter("wait: for a place among the ranks")
            # A spare waits for as long as the run lasts: it ends with its supervisor.
            limit = None if self._epoch == 0 else Deadline(seconds=self._recipe.elastic.start_deadline)
            newest = self._epoch
            if self._epoch:
                # The last view's model, with what is in the cycles of its hooks: two at once would be a second one's memory.
                gc.collect()
            while True:
                if not self._control.await_newer(newest, limit):
                    waited = self._recipe.elastic.start_deadline
                    raise PeerLost(
                        f"{self.member} left the view of epoch {self._epoch} and waited {waited:g} s for the next one, which the "
                        "supervisor did not publish",
                        ranks=[],
                    )
                newest, text = self._control.read()
                view = View.parse(text)
                if self.member in view.members:
                    break
                if self._epoch:
                    raise RunError(f"{self.member} was left out of the view of epoch {view.epoch}: {view.cause}")
            self._epoch = view.epoch
            yield view

    def build(self, view: View) -> Trainer:
        """Come to a view, and be where all its members are.

        Raises:
            PeerLost: a member did not come, or there is a newer view.
        """
        assert self._data is not None, "taking_part() comes first"
        if view.has_hosts:
            self._hang_up = HangUp(lambda: self._is_broken(view))
        world = self._join(view)
        try:
            if view.has_hosts:
                self._suspects = addresses_of(gather_texts(world, self._address), view.slots)
                self._answering.learn(self._suspects, own=self._address)
            trainer = self._lay_out(world, is_first=view.epoch == 1)
        except BaseException:
            shut_connections()
            world.close()
            raise
        try:
            _refuse_model(trainer.engine, self._data)
            trainer.boundaries.is_kept = True
            if view.epoch > 1:
                self._recover(trainer, view)
            else:
                trainer.boundaries.note(trainer.progress, trainer.engine.hooks.state)
                self._copies = self._keep_copies(trainer, view)
            if self._hang_up is not None:
                self._hang_up.settle()
            trainer.optimizer.register_step_pre_hook(lambda *_: self._note_update(trainer))
        except BaseException as error:
            # What this rank held before is still what it holds: nothing was trained since.
            self._close(trainer, keep=False)
            raise error
        return trainer

    def train(self, trainer: Trainer) -> None:
        """Train until the run is over.

        Raises:
            PeerLost: there is a newer view.
        """
        self._was_in_step = True
        steps = trainer.training_steps()
        assert isinstance(steps, Generator), "it can be closed, which ends what loads its batches"
        self._meter.begin()
        try:
            for done in steps:
                self._meter.step(data_seconds=done.data_seconds)
                self._was_in_step, self._before = False, None
                if (reason := self._why_stop_waiting()) is not None:
                    raise PeerLost(reason, ranks=[])
                self._was_in_step = True
        finally:
            steps.close()

    def leave(self, trainer: Trainer | None, error: BaseException) -> None:
        """Leave the groups of a view, and keep what is in memory.

        Raises:
            BaseException: ``error``, where it is no sign that the ranks are to be assembled anew.
        """
        is_fatal = isinstance(error, FinalError | RequestError) or not isinstance(error, Exception)
        is_newer = self._control.epoch > self._epoch
        if is_fatal or not (is_peer_failure(error) or is_newer):
            raise error
        self._left_at = time.monotonic() if self._left_at is None else self._left_at
        self._enter("wait: leaving the groups of the last view")
        if self._hang_up is not None:
            self._hang_up.close()
            self._hang_up = None
        if trainer is not None:
            self._close(trainer, keep=True)
        suspect = None
        if not is_newer:
            suspect = find_suspect(error, self._suspects, own=self._address, answering=self._answering.addresses)
        self._control.say_failed(self._slot, self._epoch, suspect=suspect)

    # --- coming together

    def _join(self, view: View) -> World:
        self._enter("wait: joining the other ranks")
        self._control.say_arrived(self._slot, view.epoch)
        rank, size = view.members.index(self.member), len(view.members)
        if view.has_hosts:
            place, store = replace(self._place, rank=rank, world_size=size), self._meet(view)
        else:
            place = replace(self._place, rank=rank, world_size=size, local_rank=rank, local_size=size, is_launched=True)
            self._await_slots(view)
            met = RecordFileStore(view.store)
            self._stores.append(met)
            store = PrefixStore(f"epoch-{view.epoch}", met)
        elastic = self._recipe.elastic
        world = join_world(
            place,
            deadline_seconds=elastic.collective_deadline,
            store=store,
            # One that dies on the way is not waited for: the next view comes soon.
            join_seconds=elastic.lease_seconds + _CONNECT_SECONDS,
        )
        if elastic.batch == "scale":
            world.num_planned = self._setup.plan.dp or 1
        else:
            world.num_logical = view.num_logical if view.num_replicas < view.num_logical else 0
        return world

    def _await_slots(self, view: View) -> None:
        """Wait until all members have come to a view, on one host."""
        limit = Deadline(seconds=_ARRIVE_SECONDS)
        while late := [slot for slot in view.slots if self._control.answers(slot).arrived < view.epoch]:
            self._check_coming(view, limit, late)
            time.sleep(_LOOK_SECONDS)

    def _meet(self, view: View) -> Store:
        """Wait until all members have come to a view, on several hosts; where they meet from then on."""
        asked = AgentStore(self._place.store)
        self._stores.append(asked)
        store = PrefixStore(f"epoch-{view.epoch}", asked)
        store.set(f"came-{self._slot}", "1")
        limit = Deadline(seconds=_ARRIVE_SECONDS)
        while not store.check([f"came-{slot}" for slot in view.slots]):
            self._check_coming(view, limit, [slot for slot in view.slots if not store.check([f"came-{slot}"])])
            time.sleep(_MEET_SECONDS)
        return store

    def _check_coming(self, view: View, limit: Deadline, late: Sequence[int]) -> None:
        if self._control.epoch > view.epoch:
            raise PeerLost(f"there is a newer view than that of epoch {view.epoch}", ranks=[])
        if limit.is_over and late:
            names = " and ".join(f"rank {slot}" for slot in late)
            raise PeerLost(
                f"{names} did not come to the view of epoch {view.epoch} within {limit.seconds:g} s", ranks=late
            )

    def _is_broken(self, view: View) -> bool:
        """Whether the step under way cannot end: the newer view is without some of this one, or it is a retry of it."""
        if self._control.epoch <= view.epoch:
            return False
        _, text = self._control.read()
        newer = set(View.parse(text).members)
        # Where others only come, the step ends, and they enter after it.
        return not newer > set(view.members)

    def _lay_out(self, world: World, *, is_first: bool) -> Trainer:
        assert self._data is not None
        self._enter("building model and data")
        # Callbacks are of one model; another model has others, which are given what the first ones remember.
        hooks, self._hooks = self._hooks, None
        return build_trainer(
            self._recipe,
            setup=self._setup,
            run_dir=self._run_dir,
            resume=self._resume and is_first,
            recovers=not is_first,
            world=world,
            rank_status=self._status,
            stop=self._stop,
            data=self._data,
            hooks=hooks,
            take_model=lambda spec: sharedmodel.take(spec) or build_seeded(self._recipe, spec),
        )

    def _recover(self, trainer: Trainer, view: View) -> None:
        self._enter("wait: agreeing on the step to go on from")
        checkpoint = trainer.persistence.newest()
        agreed = agree(trainer.world, self._held, checkpoint=checkpoint)
        counts, history = agreed.counts, agreed.history
        if agreed.chosen is None or agreed.boundary is None:
            # Nothing whole is left in memory: all that was held is of a history that ends here.
            history += 1
            trainer.resume_from_checkpoint()
            if trainer.progress.step == 0:
                load_init(trainer.engine, self._recipe)
            trainer.boundaries.note(trainer.progress, trainer.engine.hooks.state)
            source = "checkpoint"
        else:
            trainer.progress = agreed.boundary.progress
            target = trainer.engine.state(trainer.progress.step)
            own = own_shard(trainer, agreed.chosen.step)
            source = fetch_state(self._held, agreed.chosen, target, world=trainer.world, own=own)
            trainer.boundaries.put(agreed.boundary)
            trainer.persistence.go_on(trainer.progress.step)
            trainer.engine.restored()
            trainer.recall()
        redone = max(0, agreed.newest - trainer.progress.step)
        seconds = 0.0 if self._left_at is None else time.monotonic() - self._left_at
        counts = counted(
            counts, views=1, retries=int(view.is_retry), steps_redone=redone + self._was_in_step, paused_seconds=seconds
        )
        copies = self._keep_copies(trainer, view)
        trainer.world.barrier()
        # Not before: whoever fails on the way goes on with what it held. Some may fail in this very barrier, so under ZeRO, whose
        # cut is another one now, what was held is let go when they have taken a step together. Without, all have what they had.
        is_cut = trainer.engine.plan.zero > 0
        self._before = self._held if source != "checkpoint" and is_cut else None
        self._held, self._copies = MemberState(member=self.member, history=history, counts=counts), copies
        self._left_at = None
        step = trainer.progress.step
        trainer.reporter.event(Resumed(step=step, epoch=view.epoch, seconds=seconds, source=source, redone=redone))
        trainer.reporter.tell(
            f"epoch {view.epoch}: {view.num_replicas} of {view.num_logical} replicas go on from step {step} "
            f"(state: {source}), {seconds:.2f} s after the last view was left"
        )

    def _keep_copies(self, trainer: Trainer, view: View) -> PeerCopies | None:
        """Begin to keep what only this rank holds in memory that outlives it; None where every replica has everything."""
        if trainer.engine.plan.zero == 0 or self._recipe.elastic.copies == 0:
            return None
        copies = PeerCopies(trainer, hosts=view.hosts if view.has_hosts else ())
        trainer.boundaries.when_updated = copies.write
        copies.write(trainer.progress.step)
        return copies

    # --- leaving

    def _note_update(self, trainer: Trainer) -> None:
        """The weights begin to change: until the step counts, they are those of no step."""
        self._updating = trainer.progress.step

    def _close(self, trainer: Trainer, *, keep: bool) -> None:
        if keep:
            own = dict(self._before.own) if self._before is not None else {}
            copies = dict(self._before.copies) if self._before is not None else {}
            copies |= {} if self._copies is None else self._copies.held()
            step = trainer.progress.step
            if self._updating != step:
                own |= {own_shard(trainer, step): trainer.engine.state(step)}
            self._held = replace(self._held, own=own, copies=copies, boundaries=trainer.boundaries.known)
            self._before = None
            self._copies = None
        self._updating = -1
        trainer.persistence.abandon()
        # First, so that nobody waits here, for any of the rest or at the other end.
        shut_connections()
        for give_up in (trainer.reporter.close, trainer.engine.close, trainer.world.close):
            # A group whose peer is gone may refuse to be closed; it is not used again.
            with contextlib.suppress(RuntimeError, RunError):
                give_up()

    def _why_stop_waiting(self) -> str | None:
        if self._control.epoch > self._epoch:
            return f"there is a newer view than that of epoch {self._epoch}"
        return None

    def _enter(self, phase: str) -> None:
        if self._status is not None:
            self._status.enter(phase, 0)


def summary_of(counts: Mapping[str, float]) -> dict[str, Any]:
    """What the summary says of an elastic run."""
    return {
        "views": 1 + int(counts.get("views", 0)),
        "retries": int(counts.get("retries", 0)),
        "steps_redone": int(counts.get("steps_redone", 0)),
        "paused_seconds": float(counts.get("paused_seconds", 0.0)),
    }


def _refuse_model(model: ParallelModel, data: Splits) -> None:
    """Refuse a model or data whose results would depend on who is present. All ranks decide alike.

    Raises:
        RequestError: says which, and what to do.
    """
    if model.passes.has_batch_norm:
        raise RequestError(
            "elastic.mode shrink: batch norm folds its statistics by replica that is present, so the run would depend on who "
            f"died; replace it by another norm, or {FIX}"
        )
    if isinstance(data.train, Streamed):
        raise RequestError(
            "elastic.mode shrink: a stream has one reader for each process, and a process would need one for each share that it "
            f"computes; give a dataset with a length, or {FIX}"
        )
