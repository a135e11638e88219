"""A look at a module that leaves nothing behind: its modes, its buffers and the random states are as before."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn


@contextmanager
def keeping_draws() -> Iterator[None]:
    """Whatever is drawn inside, the generators of torch, Python and numpy are afterwards as before.

    A look that is taken once per process and moved one of them would make a run that is resumed another one.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


@contextmanager
def undisturbed(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Inside, the model is in training or evaluation mode; afterwards its modes, buffers and the random states are as before."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    is_fast = torch.backends.mha.get_fastpath_enabled()
    with keeping_draws():
        try:
            # torch's fused encoder layer, taken in evaluation, hides everything inside it.
            torch.backends.mha.set_fastpath_enabled(False)
            model.train(training)
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(is_fast)
            for module, mode in modes:
                module.training = mode
            with torch.no_grad():
                for buffer, kept in buffers:
                    buffer.copy_(kept)
