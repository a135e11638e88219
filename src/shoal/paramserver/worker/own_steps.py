"""Steps of a worker's own between two pushes: local steps that are joined by FedNova, and Downpour SGD (further down).

In FedNova a worker goes its own number of steps, at its own step size, and pushes a direction comparable with the others'.
Workers of different speed that each train for as long as they have time, and whose weights are then averaged, do not minimise
the mean of their objectives: the one that took the most steps pulls hardest. FedNova (Wang et al. 2020, arXiv:2007.07481) divides
what a worker moved by how far its steps could have taken it, so that only its share of the samples decides:

    d_i = (w - w_i) / (eta_i |a_i|)            what the worker pushes; for plain SGD |a_i| is its number of steps
    w <- w - eta tau sum p_i d_i               what the servers do (``aggregation.fednova``); tau = sum p_i |a_i|

``|a_i|`` is the sum of the weights with which the gradients entered the move. With momentum ``rho`` an early one is taken over
and over (the paper's section 4.1):  |a_i| = (tau_i - rho (1 - rho^tau_i) / (1 - rho)) / (1 - rho).

A push is a gradient like any other: a server that takes SGD steps at rate eta, and counts it by ``consistency.fednova_factors``,
does the second line.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.core.errors import RequestError, RunError
from shoal.paramserver.records import Read


@dataclass(frozen=True, kw_only=True)
class LocalSettings:
    """How one worker trains between two pushes. Workers may differ in all of it."""

    steps: int
    """Steps it takes."""
    lr: float
    momentum: float = 0.0
    batch: int = 1
    """Samples of one step."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch < 1 or not self.lr > 0 or not 0 <= self.momentum < 1:
            raise RequestError(
                f"{self.steps} local steps of {self.batch} samples at lr {self.lr:g} and momentum {self.momentum:g}: steps and "
                "samples must be at least 1, lr above 0, and momentum from 0 to below 1"
            )


def effective_steps(steps: int, momentum: float = 0.0) -> float:
    """``|a_i|``: how many plain steps these are worth; their number without momentum."""
    if not momentum:
        return float(steps)
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)


@dataclass(frozen=True, kw_only=True)
class Direction:
    """What a worker pushes after its steps."""

    direction: Tensor
    """``d_i``: flat, of the size of one gradient."""
    steps: float
    """``|a_i|``."""
    num_samples: int
    """Samples that it went through; what its share is made of unless the driver has fixed shares."""
    rate: float
    version: int
    """Of the weights that it began from."""


@torch.no_grad()
def train_locally(
    weights: Tensor, gradient_at: Callable[[Tensor, int], Tensor], settings: LocalSettings, *, version: int = 0
) -> Direction:
    """Take this worker's steps from the servers' weights; the weights themselves are left as they are.

    Args:
        weights: flat, as fetched.
        gradient_at: the flat gradient at some weights of this worker's step number so and so.
        settings: how many steps, and how far.
        version: of the weights.

    Raises:
        RunError: a gradient does not fit, or the steps led out of the finite numbers.
    """
    local = weights.detach().clone()
    velocity = torch.zeros_like(local)
    for step in range(settings.steps):
        gradient = gradient_at(local, step)
        if gradient.shape != local.shape or gradient.dtype != local.dtype:
            raise RunError(
                f"local step {step} gave a gradient of {gradient.dtype} {tuple(gradient.shape)} for weights of {local.dtype} "
                f"{tuple(local.shape)}"
            )
        velocity.mul_(settings.momentum).add_(gradient)
        local.add_(velocity, alpha=-settings.lr)
    count = effective_steps(settings.steps, settings.momentum)
    # One step is its gradient: going there and back again would only round it.
    direction = velocity if settings.steps == 1 else (weights.detach() - local).div_(settings.lr * count)
    if not torch.isfinite(direction).all():
        raise RunError(
            f"{settings.steps} local steps at lr {settings.lr:g} led out of the finite numbers; use a lower lr"
        )
    return Direction(
        direction=direction,
        steps=count,
        num_samples=settings.steps * settings.batch,
        rate=settings.lr,
        version=version,
    )


# -- Downpour SGD -------------------------------------------------------------------------------------------------------------
#
# A worker of Downpour SGD: it goes on alone for some steps, pushes what it gathered and fetches what the servers made of it.
#
# Dean et al., Large Scale Distributed Deep Networks (2012), section 4.1 and algorithm 7.1 of its appendix. Each step: fetch when
# the step is a multiple of ``fetch_every``; take a gradient; add it to what is accrued; take an SGD step of one's own; push when
# the step is a multiple of ``push_every``. So the first push carries one gradient and each later one ``push_every`` of them. The
# servers apply a push by any optimizer; the paper uses Adagrad.
#
# The paper fetches in the background, and an implementation that lets the answer overwrite the weights while a gradient is being
# computed mixes two versions in one gradient. Here fetched weights wait (``land``) until a step begins. Nothing here waits for
# anything: whoever drives it decides whether to pull in the background, or to pull and wait.


@dataclass(frozen=True, kw_only=True)
class DownpourSettings:
    """How often a worker talks to the servers, and how it moves in between."""

    push_every: int = 5
    fetch_every: int = 5
    lr: float
    """Of the worker's own SGD steps between two fetches."""

    def __post_init__(self) -> None:
        if self.push_every < 1 or self.fetch_every < 1 or self.lr < 0:
            raise RequestError(
                f"downpour:{self.push_every},{self.fetch_every} with lr {self.lr:g}: push and fetch every 1 step or more, "
                "and let lr not be below 0"
            )


@dataclass(frozen=True, kw_only=True)
class Push:
    """What a worker gathered."""

    gradient: Tensor
    """The sum of its gradients; flat, and nobody else's."""
    num_gradients: int
    first_step: int
    read: Read
    """The servers' weights that the oldest of these gradients began from."""

    @property
    def version(self) -> int:
        """The oldest of them: the servers' version less this is how late it is."""
        return min(self.read)


class DownpourWorker:
    """The rule of one worker over its flat weights. ``land`` may be called from any thread; all else by the one that trains.

    ::

        while training:
            if worker.wants_fetch:
                worker.land(*pull())              # or begin a pull whose answer will land later
            worker.begin_step()
            push = worker.end_step(gradient_at(weights))
            if push is not None: send(push)
        push = worker.flush()
    """

    def __init__(self, weights: Tensor, settings: DownpourSettings) -> None:
        """Begin at step 0.

        Args:
            weights: flat and live, the model's parameters are views of it; changed in place, between steps only.
            settings: how often, and how far.
        """
        assert weights.ndim == 1, f"weights are flat, not {tuple(weights.shape)}"
        self.settings = settings
        self.step = 0
        """Steps done."""
        self.read: Read = (0,)
        """The servers' weights that this worker's own are based on."""
        self.num_applied = 0
        """Fetches that reached the weights; one that a newer one overtook did not."""
        self._weights = weights.detach()
        self._accrued = torch.empty_like(self._weights)
        self._num_accrued = 0
        self._accrued_read: Read = self.read
        self._is_stepping = False
        self._landed: tuple[Tensor, Read] | None = None
        self._newest_landed: Read = (-1,)
        self._lock = threading.Lock()

    @property
    def wants_fetch(self) -> bool:
        """True when the rule asks for a fetch before the step that comes next."""
        return not self._is_stepping and self.step % self.settings.fetch_every == 0

    def land(self, weights: Tensor, read: Read) -> bool:
        """Fetched weights are here; they are used from the next step that begins. False when newer ones were here before.

        Args:
            weights: flat; kept, not copied.
            read: what they are.

        Raises:
            RunError: they do not fit the worker's.
        """
        if weights.shape != self._weights.shape or weights.dtype != self._weights.dtype:
            raise RunError(
                f"fetched weights are {weights.dtype} {tuple(weights.shape)}, and this worker has {self._weights.dtype} "
                f"{tuple(self._weights.shape)}; does every process build the same model?"
            )
        with self._lock:
            if _age(read) < _age(self._newest_landed):
                return False
            self._landed, self._newest_landed = (weights, read), read
            return True

    @torch.no_grad()
    def begin_step(self) -> None:
        """Put fetched weights in their place, if any have landed. Until ``end_step`` nothing changes the weights."""
        assert not self._is_stepping, f"step {self.step} has begun and not ended"
        with self._lock:
            landed, self._landed = self._landed, None
        if landed is not None:
            self._weights.copy_(landed[0])
            self.read = landed[1]
            self.num_applied += 1
        self._is_stepping = True

    @torch.no_grad()
    def end_step(self, gradient: Tensor, lr: float | None = None) -> Push | None:
        """Take the step's flat gradient: accrue it, move by it, and give out what is accrued when a push is due.

        Args:
            gradient: copied.
            lr: of this step's own move, where it is not the one of the settings.

        Raises:
            RunError: the gradient does not fit the weights.
        """
        assert self._is_stepping, f"step {self.step} has not begun"
        if gradient.shape != self._weights.shape or gradient.dtype != self._weights.dtype:
            raise RunError(
                f"step {self.step} gave a gradient of {gradient.dtype} {tuple(gradient.shape)} for weights of "
                f"{self._weights.dtype} {tuple(self._weights.shape)}"
            )
        if self._num_accrued:
            self._accrued.add_(gradient)
        else:
            self._accrued_read = self.read
            self._accrued.copy_(gradient)
        self._num_accrued += 1
        self._weights.add_(gradient, alpha=-(self.settings.lr if lr is None else lr))
        is_due = self.step % self.settings.push_every == 0
        self.step += 1
        self._is_stepping = False
        return self.flush() if is_due else None

    def flush(self) -> Push | None:
        """What is accrued now, which is thereby no longer; None when there is nothing. At the end of a run the rest goes out."""
        assert not self._is_stepping, f"step {self.step} has begun and not ended"
        if not self._num_accrued:
            return None
        push = Push(
            gradient=self._accrued,
            num_gradients=self._num_accrued,
            first_step=self.step - self._num_accrued,
            read=self._accrued_read,
        )
        # The push keeps its tensor: it may still be on its way when the next gradient comes.
        self._accrued = torch.empty_like(self._weights)
        self._num_accrued = 0
        return push


def _age(read: Read) -> tuple[int, int]:
    """By the shard that is furthest behind, because that is what a rule asks for; then by all of them."""
    return min(read), sum(read)
