"""What every loop of a worker has in common: what computes, its connection to the servers, and what the update log is told of a
gradient."""

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import msgspec
import torch

from shoal.core.errors import RunError
from shoal.core.events import WorkerTraffic
from shoal.paramserver.config import ParamServerConfig
from shoal.paramserver.consistency import wait_seconds
from shoal.paramserver.contact import Contact
from shoal.paramserver.epochs import EpochSpan
from shoal.paramserver.messages import FINISHED, Draw, Drawn
from shoal.paramserver.pushcodec import PushCompressor
from shoal.paramserver.records import PushRecord, Read, WorkUnit
from shoal.paramserver.sparse import RowPacker
from shoal.paramserver.worker.client import Client, LoopThread, RunOver
from shoal.paramserver.worker.flat import FlatParameters
from shoal.serverrun.process import ProcessSpec, introduction, open_finder, open_node
from shoal.serverrun.pushes import push_codec
from shoal.serverrun.worker.shares import ShareResult
from shoal.serverrun.worker.worktimes import WorkTimes
from shoal.telemetry.measurements import ExchangeMeasured

_TELL_SECONDS = 1.0
"""Between two words of what was sent."""
Brought = TypeVar("Brought")


class Shares(Protocol):
    """What computes gradients: this process (``shares.py``), or a group of processes (``group.py``)."""

    @property
    def num_samples(self) -> int:
        """Of the training split."""

    def run(
        self, step: int, share: int, *, part: int = 0, num_parts: int = 1, data: EpochSpan | None = None
    ) -> ShareResult:
        """Compute a share of a step by the weights that are in the row, or one of so many even parts of it."""

    def run_span(self, step: int, start: int, stop: int) -> float:
        """Compute a slice of a step's samples; its part of the step's mean loss."""

    def end(self) -> None:
        """There is nothing more to compute."""


@dataclass(frozen=True, kw_only=True)
class Worker:
    """What computes."""

    flat: FlatParameters
    shares: Shares
    total_steps: int
    """Of the run."""
    data: Mapping[str, str] = field(default_factory=dict)
    """The data as this process has it, for admission."""
    times: WorkTimes = field(default_factory=WorkTimes)
    """Where the time of its work units goes."""

    def compute(self, unit: WorkUnit) -> "Computed":
        """The gradient of a work unit."""
        result = self.run(unit)
        return Computed(result=result, gradient=self.flat.collect_gradient())

    def run(self, unit: WorkUnit, *, part: int = 0, num_parts: int = 1) -> ShareResult:
        """The passes over a work unit, or over one of so many even parts of it."""
        with self.times.computing():
            result = self.shares.run(unit.step, unit.share, part=part, num_parts=num_parts, data=unit.data)
        self.times.computed(result.samples)
        return result

    def run_span(self, step: int, start: int, stop: int) -> float:
        """The passes over a slice of a step's samples; its part of the step's mean loss."""
        with self.times.computing():
            loss = self.shares.run_span(step, start, stop)
        self.times.computed(stop - start)
        return loss


@dataclass(frozen=True, kw_only=True)
class Computed:
    """What a worker makes of a work unit."""

    result: ShareResult
    gradient: torch.Tensor
    """Flat; may be overwritten by the next work unit."""
    steps: float = 1.0
    """Local steps that it is the direction of."""


class ServerConnection:
    """A worker's connection under one name.

    Args:
        spec: with the name.
        worker: what computes.
        landing: where pulled weights go; the model's own weights when left out.
    """

    def __init__(self, spec: ProcessSpec, worker: Worker, landing: torch.Tensor | None = None) -> None:
        self._thread = LoopThread()
        self._spec = spec
        self._worker = worker
        self._times = worker.times
        self._told = -math.inf
        self.landing = worker.flat.weights if landing is None else landing
        """The servers' weights, as pulled last."""
        self.identity = spec.instance_id
        self.client = self._thread.call(self._open())

    async def _open(self) -> Client:
        spec, config = self._spec, self._spec.recipe.paramserver
        self._node = open_node(spec)
        flat = self._worker.flat
        codec = push_codec(spec, flat.model, self._worker.total_steps)
        join = introduction(spec, role="worker", model=flat.model, data=self._worker.data)
        self._contact = Contact(
            self._node,
            find=open_finder(spec, self._node),
            introduce=lambda view: msgspec.structs.replace(join, view=view),
            ends_with_history=True,
        )
        self._contact.start()
        started = time.monotonic()
        while (view := self._contact.view) is None or view.find(spec.instance_id) is None:
            self._contact.check()
            if self._contact.halt == FINISHED:
                raise RunOver
            if time.monotonic() - started > spec.recipe.elastic.start_deadline:
                seconds = spec.recipe.elastic.start_deadline
                raise RunError(
                    f"no center let {spec.name} in within {seconds:g} s; see that one runs, or set elastic.start_deadline higher"
                )
            await self._contact.changed.wait(0.1)
        return Client(
            self._node,
            self._contact,
            weights=self.landing,
            spans=flat.spans,
            cache_staleness=config.cache_staleness,
            packer=None if codec is not None else make_packer(flat, config),
            compressor=None if codec is None else PushCompressor(codec, flat.shard_map, spec.index),
            caches_cold=config.hot == "measured",
            deadline_seconds=config.deadline,
        )

    @property
    def run_id(self) -> str:
        """The run that this worker was let into."""
        return self._contact.run_id

    @property
    def halt(self) -> str:
        """Why the run was stopped; empty when it was not."""
        return self._contact.stopped

    def traffic(self) -> WorkerTraffic:
        """What went over this line."""
        client = self.client
        return WorkerTraffic(
            pushed_bytes=client.num_pushed_bytes,
            pulled_bytes=client.num_pulled_bytes,
            residual_bytes=client.num_kept_bytes,
        )

    def take(self, held: tuple[int, ...] = ()) -> WorkUnit | None:
        """The next work unit."""
        return self.given(self.ask(held))

    def ask(self, held: tuple[int, ...] = ()) -> "Future[WorkUnit | None]":
        """As ``take``, while something else is done; what is begun on this line after it reaches the update log after it."""
        return self._thread.start(self.client.take(held))

    def given(self, asked: "Future[WorkUnit | None]") -> WorkUnit | None:
        """The work unit that was asked for, which is what is computed next; None when there is none."""
        with self._times.taking():
            unit = asked.result()
        if unit is not None:
            self._times.begin(unit.step + 1)
            self._tell_exchange(unit.step)
        return unit

    def _tell_exchange(self, step: int) -> None:
        """Say how much went over for which gradients, now and then."""
        client, now = self.client, time.monotonic()
        if not client.num_pushed_bytes or now - self._told < _TELL_SECONDS:
            return
        self._told = now
        dense = client.num_pushes * self._worker.flat.gradient.nbytes
        norm = client.residual_norm()
        self._times.tell(
            ExchangeMeasured(step=step, sent_bytes=client.num_pushed_bytes, dense_bytes=dense, residual_norm=norm)
        )

    def pull(self, need: int, bound: int | None = None) -> Read:
        """Newer weights; what they are. See ``Client.pull``."""
        with self._times.pulling():
            return self._thread.call(self.client.pull(need, bound))

    def pulled(self, under_way: "Future[Brought]") -> Brought:
        """What a pull or a fetch brings that was begun before."""
        with self._times.pulling():
            return under_way.result()

    def settle(self, handed_in: "Future[bool] | None") -> None:
        """Wait until a gradient that was handed in, if one was, is pushed and committed."""
        if handed_in is None or handed_in.done():
            # Asked all the same: what it failed of is raised here.
            _ = handed_in and handed_in.result()
            return
        with self._times.pushing():
            handed_in.result()

    def draw(self, num_samples: int, done: tuple[int, int, float] | None) -> Drawn | None:
        """The next work unit of a batch, from whoever drives; None when the run is over. See ``messages.Draw``."""
        with self._times.taking():
            drawn = self._thread.call(self._draw(Draw(num_samples=num_samples, done=done)))
        if drawn is not None:
            self._times.begin(drawn.step + 1)
        return drawn

    async def _draw(self, draw: Draw) -> Drawn | None:
        deadline = self._spec.recipe.paramserver.deadline
        while not self._contact.halt:
            self._contact.check()
            try:
                drawn = await self._contact.tell(draw, deadline=deadline)
            except TimeoutError as error:
                self._contact.check()
                raise RunError(f"nobody drives: {error}") from error
            assert isinstance(drawn, Drawn)
            if drawn.is_over:
                return None
            if drawn.unit >= 0:
                return drawn
        return None

    def pull_now(self) -> None:
        """The weights as they are now."""
        with self._times.pulling():
            self._thread.call(self.client.pull_now())

    def add_part(self, gradient: torch.Tensor, evaluation: int, unit: int, loss: float) -> None:
        """Bring the gradient of one work unit of a batch to all servers."""
        with self._times.pushing():
            self._thread.call(self.client.add_part(gradient, evaluation=evaluation, unit=unit, loss=loss))

    def fetch(self, unit: WorkUnit, land: Callable[[torch.Tensor, Read], object]) -> "Future[None]":
        """Bring a copy of weights that are new enough, and what they are, to somebody, while something else is done."""
        return self._thread.start(self._fetch(unit, land))

    async def _fetch(self, unit: WorkUnit, land: Callable[[torch.Tensor, Read], object]) -> None:
        read = await self.client.pull(unit.need, unit.bound)
        land(self.landing.clone(), read)

    def hand_in(self, gradient: torch.Tensor, push: PushRecord, read: Read) -> "Future[bool]":
        """Push a gradient and commit it, while something else is done.

        Args:
            gradient: all shards; must stay as it is until this is done.
            push: what the update log is told of it.
            read: the weights that it was computed from.
        """
        assert push.version == min(read), f"version {push.version} is told of weights {read}"
        return self._thread.start(self._hand_in(gradient, push, read))

    def pull_after(self, handed_in: "Future[bool]") -> "Future[Read]":
        """When a gradient is handed in, bring the weights as they are then, while something else is done."""
        return self._thread.start(self._pull_after(handed_in))

    async def _pull_after(self, handed_in: "Future[bool]") -> Read:
        await asyncio.wrap_future(handed_in)
        return await self.client.pull(self.client.closed, 0)

    def use(self, read: Read) -> None:
        """The work unit that was taken last is computed with weights that were pulled before."""

    async def _hand_in(self, gradient: torch.Tensor, push: PushRecord, read: Read) -> bool:
        number = await self.client.push(gradient, read=read, unit=min(push.units))
        return await self.client.commit(msgspec.structs.replace(push, number=number))

    def close(self) -> None:
        """Leave the wire, and write down what went over it."""
        self._times.end()
        self._times.tell(self.traffic())

        async def leave() -> None:
            if self._spec.cluster is not None:
                await self._contact.leave("it has ended")
            await self._contact.stop()
            await self._node.close()

        self._thread.close(leave)


def make_packer(flat: FlatParameters, config: ParamServerConfig) -> RowPacker | None:
    """What finds the rows to send: of every tensor where that is to be measured, else of those whose gradient comes as rows."""
    if config.hot == "measured":
        return RowPacker(flat.shard_map, flat.model)
    return RowPacker(flat.shard_map, flat.model, only=flat.sparse) if flat.sparse else None


def describe(worker: str, unit: WorkUnit, computed: Computed, *, read: Read, waited: float) -> PushRecord:
    """What the update log is told of a gradient."""
    return PushRecord(
        worker=worker,
        number=0,
        units=(unit.number,),
        samples=computed.result.samples,
        weight=computed.result.weight,
        loss=computed.result.mean_loss,
        version=min(read),
        waited=waited,
        steps=computed.steps,
        rows=(computed.result.rows,),
    )


class Pace:
    """The random wait before a push, where the rule has one: workers whose rhythms differ do not come all at once."""

    def __init__(self, spec: ProcessSpec) -> None:
        self._rule = spec.rule
        self._seed = spec.recipe.train.seed
        self._index = spec.index
        self._mean = 0.0
        self._count = 0
        self._began = 0.0

    def begin(self) -> None:
        """A work unit is begun."""
        self._began = time.monotonic()

    def wait(self) -> float:
        """The work unit is computed: wait; the seconds that were waited."""
        self._count += 1
        self._mean += (time.monotonic() - self._began - self._mean) / min(self._count, 20)
        drawn = wait_seconds(self._rule, self._seed, self._index, self._count, self._mean)
        if drawn > 0:
            time.sleep(drawn)
        return drawn
