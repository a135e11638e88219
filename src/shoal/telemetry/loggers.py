"""Loggers: other programs that a run's numbers go to, each in a thread of its own.

A logger is any object with ``log(values, step)``. It may be slow, hang or raise: ``LoggerThread.write`` appends to a queue with
a limit and returns, and the thread does the rest. One that raises is let go, one that falls behind loses points, one that hangs
is left behind at the end. Each is said once, and training goes on.

Not sinks of the event log: those share its thread, so that one that hangs would keep events out of their file.
"""

import importlib.util
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from shoal.core.errors import RequestError
from shoal.core.events import Event, RunEnded
from shoal.telemetry.config import LogConfig
from shoal.telemetry.eventlog import warn_on_stderr
from shoal.telemetry.tensorboard import scalars
from shoal.telemetry.tracking import MLflowLogger, WandbLogger

_CAPACITY = 10_000
_LOOK_EVERY_S = 0.25
CLOSE_WITHIN_S = 15.0
"""How long the end of a run waits for all its loggers together: Weights & Biases needs seconds to close its files."""


class Logger(Protocol):
    """Where numbers go. Called from one thread, which is not that of training; may have a ``close()``."""

    def log(self, values: dict[str, float], step: int, /) -> None:
        """Take some numbers by name, of a run that has taken so many steps."""


def check_loggers(config: LogConfig) -> None:
    """Refuse loggers whose package is not there, before anything starts.

    Raises:
        RequestError: says which, and what to install.
    """
    for name in config.to:
        if config.to.count(name) > 1:
            raise RequestError(f"log.to names {name!r} {config.to.count(name)} times; name it once")
        module = {"tensorboard": "tensorboardX"}.get(name, name)
        if importlib.util.find_spec(module) is None:
            raise RequestError(
                f"log.to names {name!r} and the package {module} is not installed; run `pip install 'shoal[{name}]'`, or leave "
                f"{name!r} out of log.to"
            )


class LoggerThread:
    """One logger and its thread.

    Args:
        open_logger: makes it, on its own thread: an import or a connection may take its time.
        name: of the logger, for messages.
        warn: tells the user something, once.
    """

    def __init__(
        self, open_logger: Callable[[], Logger], *, name: str, warn: Callable[[str], None] = warn_on_stderr
    ) -> None:
        self.name = name
        self.dropped = 0
        """Events that were not taken because the queue was full, or the logger was off."""
        self.status = "completed"
        """How the run ended, as far as it said so."""
        self._warn = warn
        self._queue: deque[Event] = deque()
        self._is_off = False
        self._woken, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(open_logger,), name=f"logger-{name}", daemon=True)
        self._thread.start()

    def write(self, event: Event) -> None:
        """Queue an event. Never blocks and never raises."""
        if isinstance(event, RunEnded):
            self.status = event.status
        if self._is_off or len(self._queue) >= _CAPACITY:
            self.dropped += 1
        else:
            self._queue.append(event)

    def begin_to_close(self) -> None:
        """Let the thread log what is queued, close the logger and end."""
        self._closing.set()
        self._woken.set()

    def wait(self, seconds: float) -> None:
        """Wait for the end of the thread, so long at most; a logger that does not answer is left behind, and said."""
        self._thread.join(timeout=max(0.0, seconds))
        if self._thread.is_alive():
            left = len(self._queue) + self.dropped
            self._warn(
                f"logger {self.name!r} does not answer and is left behind, with {left} events that it did not take"
            )
        elif self.dropped and not self._is_off:
            self._warn(f"logger {self.name!r} was too slow: {self.dropped} events were dropped")

    def _run(self, open_logger: Callable[[], Logger]) -> None:
        # A logger is somebody else's code: training must outlive whatever it raises.
        try:
            logger = open_logger()
            while not self._closing.is_set():
                self._woken.wait(_LOOK_EVERY_S)
                self._drain(logger)
            self._drain(logger)
            if isinstance(logger, MLflowLogger | WandbLogger):
                logger.status = self.status
            close = getattr(logger, "close", None)
            if callable(close):
                close()
        except Exception as error:
            self._is_off = True
            self._warn(f"logger {self.name!r} failed and is off: {type(error).__name__}: {error}; training goes on")

    def _drain(self, logger: Logger) -> None:
        while self._queue:
            event = self._queue.popleft()
            if values := scalars(event):
                logger.log(values, int(getattr(event, "step", 0)))


def close_all(threads: Iterable[LoggerThread], *, within: float = CLOSE_WITHIN_S, has_failed: bool = False) -> None:
    """Close loggers, all at the same time, and wait for them so long at most."""
    threads = list(threads)
    for thread in threads:
        if has_failed:
            thread.status = "failed"
        thread.begin_to_close()
    deadline = time.monotonic() + within
    for thread in threads:
        thread.wait(deadline - time.monotonic())


def refuse_without_folder(config: LogConfig) -> None:
    """Refuse loggers that keep files in the run directory, where there is none: they would be left in the current folder.

    Raises:
        RequestError: names the logger, and what to give.
    """
    for name in config.to:
        if name == "mlflow" and not (config.mlflow_uri or os.environ.get("MLFLOW_TRACKING_URI")):
            raise RequestError(
                "the logger 'mlflow' keeps its runs in the run directory, and this run has none; give run_dir=, or say where "
                "with MLFLOW_TRACKING_URI"
            )
        if name in ("tensorboard", "wandb"):
            raise RequestError(f"the logger {name!r} writes to the run directory, and this run has none; give run_dir=")


def open_named(
    config: LogConfig, *, folder: str | None, name: str, facts: Mapping[str, object]
) -> dict[str, Callable[[], Logger]]:
    """How the loggers of ``log.to`` are opened, by name; TensorBoard is a sink of the event log.

    Args:
        config: of the recipe.
        folder: the run directory; None for a run that keeps nothing.
        name: of the run, where the recipe gives none.
        facts: settings of the run that the logger shows beside its numbers.
    """
    openers: dict[str, Callable[[], Logger]] = {
        "mlflow": lambda: MLflowLogger(config, folder=folder, name=config.name or name, facts=facts),
        "wandb": lambda: WandbLogger(config, folder=folder or ".", name=config.name or name, facts=facts),
    }
    return {chosen: openers[chosen] for chosen in config.to if chosen in openers}
