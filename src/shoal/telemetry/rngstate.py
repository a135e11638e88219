"""The global random generators: whether something draws from them, and looks at it that leave them as they were."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def random_states() -> tuple[Any, ...]:
    """The states of the global generators of torch, Python and numpy, as values that can be compared."""
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict), "legacy=False gives a dict"
    table = numpy_state["state"]
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), table["key"].tobytes(), table["pos"]


@contextmanager
def keeping_draws() -> Iterator[None]:
    """Whatever is drawn inside, the generators of torch, Python and numpy are afterwards as before.

    A look that is taken once per process and moved one of them would make a run that is resumed another one.
    """
    of_torch, of_python, of_numpy = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        random.setstate(of_python)
        np.random.set_state(of_numpy)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, the global generators begin at a seed; afterwards they are as before."""
    with keeping_draws():
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        yield
