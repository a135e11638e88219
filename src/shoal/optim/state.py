"""Optimizer state to and from named tensors, which is what a checkpoint holds.

torch's ``state_dict`` numbers parameters by their place in a group; a group that changes (another exemption, another order) would
then give a parameter its neighbour's moments without a word. Here every tensor is named after its parameter.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.core.errors import RunError
from shoal.optim.build import initialise_state


def export_state(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> dict[str, Tensor]:
    """Every state tensor as ``<parameter name>/<state key>``, in the order of names; the live tensors, not copies.

    Args:
        optimizer: one from ``build_optimizer``; state that does not exist yet is made, as zeros.
        names: what each of its parameters is called in the model.
    """
    initialise_state(optimizer)
    found = {
        f"{names[parameter]}/{key}": value
        for group in optimizer.param_groups
        for parameter in group["params"]
        for key, value in optimizer.state[parameter].items()
    }
    return dict(sorted(found.items()))


@torch.no_grad()
def import_state(optimizer: Optimizer, names: Mapping[nn.Parameter, str], tensors: Mapping[str, Tensor]) -> None:
    """Copy named tensors into the optimizer's state, bit for bit; nothing is changed when one does not fit.

    Raises:
        RunError: a tensor is missing, is not this optimizer's, or has another shape or type.
    """
    own = export_state(optimizer, names)
    missing, foreign = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    if missing or foreign:
        raise RunError(
            f"the saved optimizer state does not fit: {len(missing)} tensors are missing ({_first(missing)}) and {len(foreign)} "
            f"are not of this {type(optimizer).__name__} ({_first(foreign)}); resume with the optimizer and model of the save"
        )
    for name, target in own.items():
        saved = tensors[name]
        if saved.shape != target.shape or saved.dtype != target.dtype:
            raise RunError(
                f"saved optimizer state {name!r} is {saved.dtype} {tuple(saved.shape)}, and the run needs {target.dtype} "
                f"{tuple(target.shape)}; resume with the model and precision it was saved with"
            )
    for name, target in own.items():
        target.copy_(tensors[name])


def _first(names: list[str]) -> str:
    return f"first {names[0]!r}" if names else "none"
