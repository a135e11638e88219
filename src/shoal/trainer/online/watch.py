"""Looks at the samples that the first rank trains on, for drift: a hook that keeps the first window and the most recent one."""

from collections import deque
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shoal.core.rundir import replace_text
from shoal.data.loading.loader import StepBatch
from shoal.engine.hooks import Hook, StepResult
from shoal.trainer.online.drift import LossWindow, Reference, columns_of, stability, take_reference

_KEPT = "drift.json"


class DriftWatch(Hook):
    """Keeps the last ``window`` samples of the first rank, and what the first ``window`` of the run looked like.

    Args:
        window: samples.
        folder: where the first window is kept, so that a run that goes on compares with the same; None on other ranks, which do
            nothing.
    """

    name = "drift"

    def __init__(self, window: int, folder: Path | None) -> None:
        self._window, self._folder = window, folder
        self._recent: deque[dict[str, NDArray[np.float64]]] = deque()
        self._sizes: deque[int] = deque()
        self.losses = LossWindow()
        self.reference: Reference | None = None
        """The first window; None until it is full."""
        if folder is not None and (folder / _KEPT).is_file():
            try:
                self.reference = Reference.from_text((folder / _KEPT).read_text())
            except ValueError:
                self.reference = None  # The next full window takes its place.

    def on_step_start(self, step: int, batch: StepBatch) -> None:
        """See ``Hook``."""
        if self._folder is None:
            return
        for microbatch in batch.microbatches:
            found: dict[str, NDArray[np.float64]] = {}
            for place, tensor in enumerate(microbatch.inputs):
                # bfloat16 is no type of numpy's.
                values = tensor.detach().cpu()
                found |= columns_of(
                    f"input {place}", (values.float() if values.is_floating_point() else values).numpy()
                )
            self._recent.append(found)
            self._sizes.append(len(microbatch.sample_ids))
        while len(self._sizes) > 1 and sum(self._sizes) - self._sizes[0] >= self._window:
            self._recent.popleft()
            self._sizes.popleft()
        if self.reference is None and self.num_samples >= self._window and (columns := self._columns()):
            self.reference = take_reference(columns)
            self._folder.mkdir(exist_ok=True)
            replace_text(self._folder / _KEPT, self.reference.as_text())

    def on_update(self, step: int, result: StepResult) -> None:
        """See ``Hook``."""
        self.losses.add(result.loss)

    @property
    def num_samples(self) -> int:
        """In the recent window."""
        return sum(self._sizes)

    def measure(self) -> tuple[float, str] | None:
        """The largest stability index of an input and its name; None while the first window is not full."""
        return None if self.reference is None else stability(self.reference, self._columns())

    def _columns(self) -> dict[str, NDArray[np.float64]]:
        names = list(dict.fromkeys(name for one in self._recent for name in one))
        return {name: np.concatenate([one[name] for one in self._recent if name in one]) for name in names}
