"""The global random states of a process, as tensors, so that a resumed rank goes on where it was.

Shoal itself draws nothing from them (dropout and order are keyed); they are here for what the user's own code draws.
"""

import random
from collections.abc import Mapping

import numpy as np
import torch

from shoal.core.errors import RunError
from shoal.core.seeding import derive_key

# Words in the state of a Mersenne Twister.
_TABLE = 624


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
    _, python_words, python_gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict), "legacy=False gives a dict"
    words, position = numpy_state["state"]["key"], numpy_state["state"]["pos"]
    tails = {
        "python_tail": [float(python_gauss is not None), python_gauss or 0.0],
        "numpy_tail": [float(position), float(numpy_state["has_gauss"]), float(numpy_state["gauss"])],
    }
    prefix = f"rng/rank-{rank:03d}"
    states = {
        f"{prefix}/torch": torch.get_rng_state(),
        f"{prefix}/python": torch.tensor(python_words, dtype=torch.int64),
        f"{prefix}/numpy": torch.from_numpy(words.astype(np.int64)),
        **{f"{prefix}/{name}": torch.tensor(tail, dtype=torch.float64) for name, tail in tails.items()},
    }
    if torch.cuda.is_available():
        states[f"{prefix}/cuda"] = torch.cuda.get_rng_state()
    return states


def import_random_state(states: Mapping[str, torch.Tensor], rank: int) -> bool:
    """Put back what ``export_random_state`` took; False when the checkpoint has nothing for this rank.

    Raises:
        RunError: a state is not one: numpy would believe a position outside its table, and read memory that is not its own.
    """
    prefix = f"rng/rank-{rank:03d}"
    if f"{prefix}/torch" not in states:
        return False
    try:
        python_words, numpy_words = states[f"{prefix}/python"].tolist(), states[f"{prefix}/numpy"].tolist()
        has_python_gauss, python_gauss = states[f"{prefix}/python_tail"].tolist()
        position, has_gauss, gauss = states[f"{prefix}/numpy_tail"].tolist()
        if len(numpy_words) != _TABLE or not 0 <= position <= _TABLE or has_gauss not in (0, 1):
            raise ValueError(f"{len(numpy_words)} words at position {position}")
        torch.set_rng_state(states[f"{prefix}/torch"])
        random.setstate((3, tuple(python_words), python_gauss if has_python_gauss else None))
        words = np.array(numpy_words, dtype=np.uint32)
        np.random.set_state(("MT19937", words, int(position), int(has_gauss), gauss))
        if f"{prefix}/cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states[f"{prefix}/cuda"])
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise RunError(f"the random state of rank {rank} is not one: {error}") from error
    return True
