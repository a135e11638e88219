"""Appends to a store while a run trains on it, at the step that ``APPEND`` says, from the first rank."""

import os

import numpy as np

from shoal.data.store.writer import append_store
from shoal.data.table import Table, number_column
from shoal.engine.hooks import Hook


def rows(start, stop):
    """Rows of two inputs and a class, each told apart from all others by its number."""
    numbers = np.arange(start, stop)
    return Table(
        columns=(
            number_column("a", np.sin(numbers).astype(np.float32)),
            number_column("b", (numbers / 100).astype(np.float32)),
            number_column("label", (numbers % 3).astype(np.int64)),
        ),
        num_rows=len(numbers),
    )


class Appends(Hook):
    """Appends ``START:STOP`` after step ``STEP`` where ``APPEND`` is ``STEP:START:STOP``."""

    def on_attach(self, model):
        self._world = model.world

    def on_update(self, step, result):
        told = os.environ.get("APPEND", "")
        if told and self._world.is_first:
            at, start, stop = map(int, told.split(":"))
            if step + 1 == at:
                append_store([rows(start, stop)], os.environ["STORE"])
