"""The global random states of a process, as tensors, so that a resumed rank goes on where it was.

Shoal itself draws nothing from them (dropout and order are keyed); they are here for what the user's own code draws.
"""

import random
from collections.abc import Mapping

import numpy as np
import torch

from shoal.core.seeding import derive_key


def seed_process(seed: int, *, rank: int) -> None:
    """Give this rank its own streams; ranks must differ, or augmentation would repeat across replicas."""
    key = derive_key(seed, "process", rank)
    torch.manual_seed(key)
    random.seed(key)
    np.random.seed(key % 2**32)


def seed_for_build(seed: int) -> None:
    """Give every rank the same streams: initial weights are what one process would build."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def export_random_state(rank: int) -> dict[str, torch.Tensor]:
    """The states of torch, Python and numpy, by checkpoint name."""
    _, python_words, _ = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict), "legacy=False gives a dict"
    numpy_words, position = numpy_state["state"]["key"], numpy_state["state"]["pos"]
    has_gauss, gauss = numpy_state["has_gauss"], numpy_state["gauss"]
    numpy_tail = np.array([float(position), float(has_gauss), float(gauss)])
    prefix = f"rng/rank-{rank:03d}"
    states = {
        f"{prefix}/torch": torch.get_rng_state(),
        f"{prefix}/python": torch.tensor(python_words, dtype=torch.int64),
        f"{prefix}/numpy": torch.from_numpy(numpy_words.astype(np.int64)),
        f"{prefix}/numpy_tail": torch.from_numpy(numpy_tail),
    }
    if torch.cuda.is_available():
        states[f"{prefix}/cuda"] = torch.cuda.get_rng_state()
    return states


def import_random_state(states: Mapping[str, torch.Tensor], rank: int) -> bool:
    """Put back what ``export_random_state`` took; False when the checkpoint has nothing for this rank."""
    prefix = f"rng/rank-{rank:03d}"
    if f"{prefix}/torch" not in states:
        return False
    torch.set_rng_state(states[f"{prefix}/torch"])
    random.setstate((3, tuple(states[f"{prefix}/python"].tolist()), None))
    position, has_gauss, gauss = states[f"{prefix}/numpy_tail"].tolist()
    words = states[f"{prefix}/numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", words, int(position), int(has_gauss), gauss))
    if f"{prefix}/cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states[f"{prefix}/cuda"])
    return True
