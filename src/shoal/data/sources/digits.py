"""The real 8x8 digits that scikit-learn ships: 1797 images of ten classes. No torch.

The table is read from scikit-learn's file where it is, because importing scikit-learn to get it takes longer than training on it.
"""

import gzip
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import RequestError
from shoal.data.order import permute
from shoal.data.spec import DataSpec

NUM_DIGITS = 1797
DIGITS_SPEC = DataSpec(kind="classes", features=(1, 8, 8), classes=10)

_BRIGHTEST = 16.0
_SPLIT_SEED = 0


@dataclass(frozen=True, kw_only=True)
class Digits:
    """Images (1797, 1, 8, 8) from 0 to 1, and their digits, in a fixed mixed order so that every split has all classes."""

    images: NDArray[np.float32]
    digits: NDArray[np.int64]


def require_digits() -> Path:
    """The folder of scikit-learn, found without importing it.

    Raises:
        RequestError: scikit-learn is not installed.
    """
    found = importlib.util.find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise RequestError("data.source = 'digits' needs scikit-learn; install it with: pip install 'shoal[digits]'")
    return Path(found.submodule_search_locations[0])


def read_digits() -> Digits:
    """The images, the same on every machine.

    Raises:
        RequestError: scikit-learn is not installed.
    """
    table = _read_table(require_digits() / "datasets" / "data" / "digits.csv.gz")
    # The file is ordered by writer: without mixing, the held-out digits would all be by the last few.
    order = permute(_SPLIT_SEED, 0, len(table), np.arange(len(table)))
    mixed = table[order]
    images = (mixed[:, :-1] / _BRIGHTEST).astype(np.float32).reshape(-1, 1, 8, 8)
    return Digits(images=images, digits=mixed[:, -1].astype(np.int64))


def _read_table(path: Path) -> NDArray[Any]:
    if path.is_file():
        with gzip.open(path, "rt") as file:
            return np.loadtxt(file, delimiter=",", dtype=np.float64)
    from sklearn.datasets import load_digits  # Slow to import, and only needed where the file has moved.

    images, digits = load_digits(return_X_y=True)
    return np.column_stack((images, digits))
