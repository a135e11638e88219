"""What a fit leaves behind: arrays in safetensors and values in JSON, with the digest of the rows that it saw. Never a pickle."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from shoal.core.errors import RequestError

JSON_NAME = "fitted.json"
"""The file that comes last and names the digest of all."""
ARRAYS_NAME = "fitted.safetensors"
_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class StepState:
    """What one step has learned."""

    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    """Texts and numbers that are JSON."""


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """What all steps have learned, and from what."""

    steps: tuple[StepState, ...]
    rows_digest: str
    """Of the numbers of the training rows that were seen."""
    num_rows: int
    recipe: str
    """The steps' configs as JSON: a state of other steps is refused."""
    labels: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Names of the classes of each target."""

    @property
    def digest(self) -> str:
        """A hash of everything in it: two processes that agree on it prepare rows alike."""
        found = hashlib.blake2b(self._json().encode(), digest_size=16)
        for name, array in sorted(self._arrays().items()):
            found.update(f"{name}{array.dtype.str}{array.shape}".encode())
            found.update(np.ascontiguousarray(array).tobytes())
        return found.hexdigest()

    def _arrays(self) -> dict[str, NDArray[Any]]:
        return {
            f"{place}.{name}": array for place, step in enumerate(self.steps) for name, array in step.arrays.items()
        }

    def _json(self) -> str:
        values = {
            "format": _FORMAT,
            "rows_digest": self.rows_digest,
            "num_rows": self.num_rows,
            "recipe": self.recipe,
            "labels": {name: list(names) for name, names in self.labels.items()},
            "steps": [dict(step.values) for step in self.steps],
        }
        return json.dumps(values, ensure_ascii=True, sort_keys=True)

    def save(self, folder: Path) -> None:
        """Write it; the JSON file, which has the digest of both, comes last and whole."""
        folder.mkdir(parents=True, exist_ok=True)
        arrays = {name: np.ascontiguousarray(array) for name, array in self._arrays().items()}
        save_file(arrays, folder / f"{ARRAYS_NAME}.part")
        os.replace(folder / f"{ARRAYS_NAME}.part", folder / ARRAYS_NAME)
        text = json.dumps({"digest": self.digest, "fitted": json.loads(self._json())}, ensure_ascii=True)
        (folder / f"{JSON_NAME}.part").write_text(text)
        os.replace(folder / f"{JSON_NAME}.part", folder / JSON_NAME)


def load_fitted(folder: Path) -> Fitted:
    """A saved state.

    Raises:
        RequestError: there is none, or it is torn or altered.
    """
    try:
        whole = json.loads((folder / JSON_NAME).read_text())
        arrays = load_file(folder / ARRAYS_NAME)
        values = whole["fitted"]
        steps = []
        for place, own in enumerate(values["steps"]):
            prefix = f"{place}."
            taken = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
            steps.append(StepState(arrays=taken, values=own))
        fitted = Fitted(
            steps=tuple(steps),
            rows_digest=values["rows_digest"],
            num_rows=values["num_rows"],
            recipe=values["recipe"],
            labels={name: tuple(names) for name, names in values["labels"].items()},
        )
        if fitted.digest != whole["digest"]:
            raise ValueError("its digest is another")
    except FileNotFoundError as error:
        raise RequestError(f"{folder} has no fitted transforms ({error.filename} is missing)") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise RequestError(
            f"the fitted transforms in {folder} are torn or altered: {error}; train again, or fetch them again"
        ) from error
    return fitted
