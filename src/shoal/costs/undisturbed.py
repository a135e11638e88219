"""A look at a module that leaves nothing behind: its modes, its buffers and the random states are as before."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from shoal.telemetry.draws import keeping_draws


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
