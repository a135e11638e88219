"""What a rank tells the world while it trains: events, the board that the supervisor watches, warnings.

The loop calls one method per thing that happened. Everything slow (files, TensorBoard, memory readings) is behind a queue
or a clock, because a metric must never cost a step.
"""

import functools
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

from shoal.comm.trafficcounter import TrafficCounter
from shoal.comm.world import World
from shoal.core.errors import RequestError
from shoal.core.events import (
    Evaluated,
    Event,
    IslandsMeasured,
    MemoryMeasured,
    RateAdapted,
    RoundDone,
    RunStarted,
    StepDone,
    Warned,
)
from shoal.core.rundir import RunDir
from shoal.data.loading.loader import Loader
from shoal.data.source import Source
from shoal.engine.exchanged import measure_exchange
from shoal.engine.forecast import forecast_run
from shoal.engine.model import ParallelModel
from shoal.randomness.dropout import DropoutKey
from shoal.telemetry.config import LogConfig, TelemetryConfig
from shoal.telemetry.eventlog import EventLog
from shoal.telemetry.loggers import Logger, LoggerThread, check_loggers, close_all, open_named, refuse_without_folder
from shoal.telemetry.measurements import AxisTraffic, RankLocation
from shoal.telemetry.memory import breakdown, rss_bytes
from shoal.telemetry.statusboard import RankStatus
from shoal.telemetry.stepclock import StepClock
from shoal.telemetry.tensorboard import TensorBoardSink, wants_curves

_PUBLISH_EVERY_SECONDS = 0.2
_RATE_WINDOW_STEPS = 20


class Reporter:
    """One rank's voice. Without a run directory nothing is written; without a board nothing is shown."""

    def __init__(
        self,
        run_dir: Path | None,
        *,
        world: World,
        config: TelemetryConfig,
        rank_status: RankStatus | None,
        total_steps: int,
    ) -> None:
        self.world = world
        self.rank_status = rank_status
        self.total_steps = total_steps
        self.log: EventLog | None = None
        if run_dir is not None:
            folder = RunDir(run_dir).tensorboard
            sinks = [lambda: TensorBoardSink(folder)] if world.is_first and wants_curves(config) else []
            self.log = EventLog(run_dir, world.rank, sinks=sinks)
        self.run_dir = run_dir
        self.clock = StepClock(rank_status, spans_every=0 if self.log is None else config.spans_every)
        """Hears every phase that this rank enters, and passes it on to the supervisor."""
        self._traffic: TrafficCounter | None = None
        self._engine: ParallelModel | None = None
        self.loggers: list[LoggerThread] = []
        self.validation_loss: float | None = None
        self.noise_scale: float | None = None
        self.distance: float | None = None
        self._recent: deque[tuple[float, int]] = deque(maxlen=_RATE_WINDOW_STEPS)
        self._published = 0.0

    def add_loggers(
        self, config: LogConfig | None, own: Iterable[Logger] = (), *, facts: Mapping[str, object] | None = None
    ) -> None:
        """Send numbers to other programs too, from the first rank.

        Args:
            config: which of those that Shoal knows; None for none.
            own: objects of the user's own, each with ``log(values, step)``.
            facts: settings that such programs show beside the numbers.

        Raises:
            RequestError: the package of one is not installed, or one cannot log.
        """
        config, own = config or LogConfig(), list(own)
        check_loggers(config)
        for one in own:
            if isinstance(one, type) or not callable(getattr(one, "log", None)):
                raise RequestError(
                    f"the logger {one!r} has no log(values, step) that can be called; give an object that has, or a name: "
                    "tensorboard, mlflow, wandb"
                )
        if self.run_dir is None:
            refuse_without_folder(config)
        if not self.world.is_first:
            return
        folder = None if self.run_dir is None else str(self.run_dir)
        named = open_named(config, folder=folder, name=Path(folder or ".").absolute().name, facts=facts or {})
        self.loggers += [LoggerThread(opener, name=name) for name, opener in named.items()]
        self.loggers += [LoggerThread(functools.partial(_itself, one), name=type(one).__name__) for one in own]

    def event(self, event: Event) -> None:
        """Record something that happened; callable from any thread, never blocks."""
        if self.log is not None:
            self.log.write(event)
        for logger in self.loggers:
            logger.write(event)

    def started(self, plan: str, *, step: int, engine: ParallelModel, source: Source) -> None:
        """Record that this rank begins to train, after so many steps, where it is, and what that should cost."""
        world, mesh = self.world, engine.mesh
        self.event(
            RunStarted(plan=plan, world_size=world.size, step=step, generation=world.generation, pid=os.getpid())
        )
        self.event(
            RankLocation(
                host=socket.gethostname(),
                device=str(world.device),
                local_rank=world.local_rank,
                coordinates={axis.value: place for axis, place in mesh.coordinates.items() if mesh.has(axis)},
                threads=torch.get_num_threads(),
                pid=os.getpid(),
            )
        )
        if self.log is not None and (forecast := forecast_run(engine, source, self.run_dir)) is not None:
            self.event(forecast)
        self._traffic = mesh.traffic
        self._engine = engine
        self.clock.follow(mesh.traffic)

    def flush(self) -> None:
        """Wait until what was recorded is in the file; called from a thread that may block."""
        if self.log is not None:
            self.log.flush()

    def step(self, done: StepDone) -> None:
        """Record a step, and now and then put it where the display looks."""
        self.event(done)
        self._recent.append((done.seconds, done.tokens))
        now = time.monotonic()
        is_last = 0 < self.total_steps <= done.step
        if self.rank_status is not None and (is_last or now - self._published >= _PUBLISH_EVERY_SECONDS):
            self._published = now
            self._publish(self.rank_status, done)

    def spans(self, step: int, *, num_steps: int = 1) -> None:
        """Record what this rank did in the step that has just ended, or in so many up to it, if that was chosen."""
        if (spans := self.clock.take_spans(step, num_steps=num_steps)) is not None:
            self.event(spans)

    def _publish(self, rank_status: RankStatus, done: StepDone) -> None:
        seconds = sum(step_seconds for step_seconds, _ in self._recent)
        tokens = sum(step_tokens for _, step_tokens in self._recent)
        # An image or a row of a table is one item, and nobody calls it a token.
        items = "tokens" if done.tokens > done.samples else "samples"
        rank_status.publish(
            {
                "step": done.step,
                # 0 where nobody knows, as in a script's own loop.
                "total_steps": self.total_steps or None,
                "loss": done.loss,
                "lr": done.lr,
                "grad_norm": done.grad_norm,
                f"{items}_per_s": tokens / seconds if seconds > 0 else 0.0,
                "rss_bytes": rss_bytes(),
                "eta_s": (self.total_steps - done.step) * seconds / max(1, len(self._recent))
                if self.total_steps
                else None,
                "validation_loss": self.validation_loss,
                **({} if self.noise_scale is None else {"noise_scale": self.noise_scale}),
                **({} if self.distance is None else {"distance": self.distance}),
            }
        )

    def evaluated(self, event: Evaluated) -> None:
        """Record an evaluation; the display shows the newest validation loss."""
        self.event(event)
        if event.split == "validation":
            self.validation_loss = event.loss

    def adapted(self, event: RateAdapted) -> None:
        """Record what the learning rate follows; the display shows the newest gradient noise scale."""
        self.event(event)
        self.noise_scale = event.noise_scale

    def tell(self, *messages: str, speaks: bool | None = None) -> None:
        """Tell the user something, once for all ranks; a line for each.

        Args:
            messages: a line each.
            speaks: this rank says it; left out, the first rank of the run does. For what only some ranks know.
        """
        for message in messages if (self.world.is_first if speaks is None else speaks) else ():
            print(message, file=sys.stderr, flush=True)

    def warn(self, *messages: str, speaks: bool | None = None) -> None:
        """Tell the user something that the run survives: once on the terminal, and in the events of every rank."""
        for message in messages:
            self.event(Warned(message=message))
            self.tell(f"warning: {message}", speaks=speaks)

    def rounds(self, events: Iterable[RoundDone | IslandsMeasured]) -> None:
        """Record rounds of islands, and how far they are apart; the display shows the newest distance."""
        for event in events:
            self.event(event)
            if event.distance is not None:
                self.distance = event.distance
            for island in event.left_out if isinstance(event, RoundDone) else ():
                self.warn(
                    f"step {event.step}: the weights of island {island} are not finite, so a round leaves it out; it goes on "
                    f"from the agreed weights with a new optimizer state"
                )

    def memory(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, step: int) -> MemoryMeasured:
        """Measure where this rank's memory is, and record it, with what has crossed between ranks so far."""
        measured = breakdown(model, optimizer).as_event(step)
        self.event(measured)
        self.traffic(step)
        return measured

    def traffic(self, step: int) -> None:
        """Record what has crossed between this rank and the others so far, and what was exchanged of gradients or weights."""
        if self._traffic is not None and self._traffic.totals:
            self.event(AxisTraffic(step=step, rows=self._traffic.rows()))
        if self._engine is not None and (exchange := measure_exchange(self._engine, step)) is not None:
            self.event(exchange)

    def enter(self, phase: str, step: int) -> None:
        """Say what the loop is about to do, so that a hang can be explained."""
        self.clock.enter(phase, step)

    def close(self, *, has_failed: bool = False) -> None:
        """Flush and stop the writers: of loggers, those that answer within seconds, which are told of a run that failed."""
        if self.log is not None:
            self.log.close()
        close_all(self.loggers, has_failed=has_failed)
        self.loggers = []


def _itself(logger: Logger) -> Logger:
    return logger


def describe_draws(dropout: DropoutKey, loader: Loader) -> Iterator[str]:
    """One warning for each kind of draw that another number of processes would do otherwise."""
    for path, shape in dropout.odd_shapes().items():
        yield (
            f"dropout {path!r} sees a tensor of shape {shape}, whose first dim is not the batch: its mask is not drawn "
            "by sample and can differ on another number of processes; put the batch first where that matters"
        )
    if loader.why_read_again is not None:
        yield f"{loader.why_read_again}: the samples of this epoch that were trained on before were read again, and dropped"
    if loader.draws_random_numbers:
        yield (
            "loading a sample draws from a global generator: samples are loaded in step and not ahead, and another number of "
            "processes will draw other numbers; seed a generator of its own by the sample's index where that matters"
        )
    if foreign := dropout.foreign_draws():
        yield (
            f"the model draws random numbers in its forward pass that are not dropout: {', '.join(foreign)}; "
            "another number of processes will draw other numbers"
        )
