"""What a step is made of in time: the parts that ``cost.py`` prices, ``simulate.py`` plays and ``explain.py`` talks about.

All times are seconds on one rank. Ranks of one pipeline place are alike, so a step of thousands of devices is as many parts as
the pipeline has stages.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

Seconds = float


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """One stage and one microbatch. ``input`` and ``weight`` are the two halves of a whole backward pass.

    ``forward``, ``input`` and ``weight`` include what recompute adds and the communication along ``tp``, ``cp`` and ``ep`` that
    nothing hides; ``exposed`` says how much of the three that communication is, by axis.
    """

    forward: Seconds
    input: Seconds
    weight: Seconds
    exposed: Mapping[str, Seconds] = field(default_factory=dict)

    @property
    def backward(self) -> Seconds:
        """Both halves."""
        return self.input + self.weight


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """A whole step of one replica's pipeline."""

    stages: tuple[StageTimes, ...]
    """By stage; there are ``pp * chunks`` of them."""
    microbatches: int
    transfer: Seconds = 0.0
    """An activation, or its gradient, from one pipeline rank to the next."""
    overlaps_transfer: bool = True
    """Ranks compute while a transfer goes on. If not, every pass has one in it: of what it takes and what it hands on at once."""
    reduce: Seconds = 0.0
    """Gradients along ``dp``, all of one rank, if nothing hid them."""
    reduce_hidden: Seconds = 0.0
    """How much of ``reduce`` goes on during the last backward passes."""
    gather: Seconds = 0.0
    """Weights along ``dp`` (ZeRO), all of one step, if nothing hid them."""
    gather_hidden: Seconds = 0.0
    """How much of ``gather`` goes on during compute."""
    update: Seconds = 0.0
    """The optimizer, with clipping."""
    fixed: Seconds = 0.0
    """What a step takes whatever its size: launches, the loss, logging."""

    @property
    def delay(self) -> Seconds:
        """From the end of a pass until another rank has its result: nothing where passes have the transfers in them."""
        return self.transfer if self.overlaps_transfer else 0.0

    @property
    def after_pipeline(self) -> Seconds:
        """What comes after the last cell on the critical path."""
        return (
            max(0.0, self.reduce - self.reduce_hidden)
            + max(0.0, self.gather - self.gather_hidden)
            + self.update
            + self.fixed
        )
