"""Which checkpoints are good. A state is saved before anybody has computed with it; it is good once a step was taken from it.

The step after the one that ruins the weights finds a loss or a gradient that is not finite. What was saved in between is whole,
and nobody can go on from it. Pure, no torch.
"""


class Proven:
    """What one process knows of the checkpoints of its own run. One thread tells of commits, another of steps."""

    def __init__(self) -> None:
        self._committed: tuple[int, ...] = ()
        """Of this run, oldest first, as far back as the newest good one."""
        self._taken = 0

    def begin(self, step: int, *, good: int | None) -> None:
        """The run goes on from this checkpoint; ``good`` is the newest on the disk, up to this one, that is marked as good."""
        self._committed = (step,) if good is None or good == step else (good, step)
        self._taken = step + 1 if good == step else step

    def commit(self, step: int) -> None:
        """A checkpoint has got its name."""
        known = (other for other in self._committed if other != step and other >= (self.good or 0))
        self._committed = (*known, step)

    def take(self, step: int) -> bool:
        """All that step number ``step`` computed with and found was finite; True when that makes a newer checkpoint good."""
        before, self._taken = self.good, max(self._taken, step)
        return self.good != before

    @property
    def good(self) -> int | None:
        """The step of the newest good checkpoint; None when there is none."""
        return max((step for step in self._committed if step < self._taken), default=None)

    @property
    def anchor(self) -> int | None:
        """The step of the checkpoint that retention must leave: the newest good one, else the oldest that may turn out to be."""
        return self.good if self.good is not None else min(self._committed, default=None)
