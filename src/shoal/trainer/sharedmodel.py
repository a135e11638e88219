"""The model of a run, built once on this machine and shared by the ranks that are forked from the process which built it.

``build`` runs in the template of the fork server (``launch/template.py``) and ``take`` in each rank. A rank that is forked has
the whole model from its start at the cost of none: its pages are those of the other ranks until they are written to, and what
the plan does not leave on the rank is let go of without ever having been the rank's own. Weights, and the random states after
them, are the bits that the rank would have drawn by itself.

A rank that was not forked, or whose data has other shapes than the request found, takes nothing and builds its own.
"""

import json
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from shoal.core.config import read_toml, validate
from shoal.core.rundir import RunDir
from shoal.data.spec import DataSpec
from shoal.launch.template import CannotShareError
from shoal.trainer.build import build_seeded
from shoal.trainer.config import Recipe

_DEVICE_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
_OF_SHAPE = ("kind", "vocab", "sequence", "features", "classes", "outputs")
"""What a model is built by."""


@dataclass(frozen=True)
class _SharedModel:
    model: nn.Module
    shapes: Mapping[str, Any]
    random_states: tuple[Any, ...]


_SHARED: list[_SharedModel] = []
"""What this process was forked with, until it is taken."""


def build(run_dir: str, spec_text: str, threads: str) -> None:
    """Build the model of the run in a directory, for the forks of this process.

    Args:
        run_dir: the run directory, with its recipe.
        spec_text: the shapes of the data, a ``DataSpec`` as JSON.
        threads: compute threads of a rank: more than one may round otherwise than one does.

    Raises:
        CannotShareError: the model cannot be shared.
    """
    _count_on(int(threads))
    # Where there may be a GPU, the user's code may start it, and what was started before a fork is lost after it.
    if (torch.version.cuda or torch.version.hip) and any(map(os.path.exists, _DEVICE_FILES)):
        raise CannotShareError
    values = json.loads(spec_text)
    spec = DataSpec(**{**values, "features": None if values["features"] is None else tuple(values["features"])})
    path = RunDir(Path(run_dir)).recipe
    model = build_seeded(validate(Recipe, read_toml(path), origin=str(path)), spec)
    if any(tensor.device.type != "cpu" for tensor in _tensors(model)):
        raise CannotShareError("its tensors are not on the CPU, and ranks share nothing else")
    states = (torch.get_rng_state(), random.getstate(), np.random.get_state())
    _SHARED[:] = [_SharedModel(model, _shapes(spec), states)]


def take(spec: DataSpec) -> nn.Module | None:
    """The model that this process was forked with, once, and its random states; None where there is none for these shapes."""
    if not _SHARED:
        return None
    shared = _SHARED.pop()
    if shared.shapes != _shapes(spec):
        return None
    of_torch, of_python, of_numpy = shared.random_states
    torch.set_rng_state(of_torch)
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    return shared.model


def _count_on(threads: int) -> None:
    """Compute with a rank's number of threads, but leave none running that a fork would wait for.

    Raises:
        CannotShareError: torch has another number here.
    """
    if threads == 1:
        torch.set_num_threads(1)
    elif torch.get_num_threads() != threads:
        # Only torch.set_num_threads could change that, which starts threads that nobody can end.
        raise CannotShareError(
            f"a rank has {threads} compute threads, and this machine {torch.get_num_threads()} cores"
        )


def _shapes(spec: DataSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in _OF_SHAPE}


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]
