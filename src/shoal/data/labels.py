"""One label space: the labels of all workers and shards in one vocabulary, whose order does not depend on how many there are.

Labels are sorted by their bytes, numbers by their value; those that come later are appended, so that an id never changes
its meaning.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shoal.core.config import Config
from shoal.core.errors import RequestError
from shoal.data.partition.keys import group_rows
from shoal.data.spec import IGNORED
from shoal.data.table import Table

Label = str | int
_KINDS = (int, str)
MOST = 1 << 20
"""Labels of the largest vocabulary, where the recipe says nothing."""


class LabelsConfig(Config):
    """What ``[data.labels]`` of a recipe can say."""

    unknown: Literal["refuse", "count", "append"] = "refuse"
    """A held-out label that no training row has: refuse it; count it, and leave it out of loss and metrics; or append it."""
    most: int = MOST
    """The largest vocabulary."""


@dataclass(frozen=True, kw_only=True)
class LabelSpace:
    """Names of the classes; a label's id is its place."""

    names: tuple[Label, ...]

    @property
    def digest(self) -> str:
        """What two workers must agree on."""
        return hashlib.blake2b(json.dumps(self.names, ensure_ascii=True).encode(), digest_size=16).hexdigest()

    @cached_property
    def _places(self) -> dict[Label, int]:
        return {name: place for place, name in enumerate(self.names)}

    def describe(self) -> str:
        """In a few words, which are others for other labels."""
        first, last = (f"{str(self.names[place])[:30]!r}" for place in (0, -1)) if self.names else ("none", "none")
        return f"{len(self.names)} labels from {first} to {last}, digest {self.digest[:12]}"

    def append(self, labels: Iterable[Label], *, most: int = MOST, what: str = "target") -> "LabelSpace":
        """With these labels behind those that are there; no old id moves.

        Raises:
            RequestError: there are too many.
        """
        names = (*self.names, *sort_labels(set(labels) - set(self.names)))
        _refuse_too_many(len(names), most, what)
        return LabelSpace(names=names)

    def encode(self, labels: Sequence[Label], codes: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
        """Ids of rows, given their distinct labels and places among them; the number of rows whose label is unknown, which get
        the id that counts for nothing."""
        ids = np.array([self._places.get(label, IGNORED) for label in labels], dtype=np.int64)
        found = ids[codes] if len(ids) else np.zeros(0, np.int64)
        return found, int((found == IGNORED).sum())


def sort_labels(labels: Iterable[Label]) -> list[Label]:
    """Numbers by value, then texts by their bytes."""
    return sorted(labels, key=lambda label: (1, 0, label.encode()) if isinstance(label, str) else (0, label, b""))


def unite_labels(parts: Iterable[Iterable[Label]], *, most: int = MOST, what: str = "target") -> LabelSpace:
    """The vocabulary of all workers' and shards' labels, the same for any number and order of them.

    Raises:
        RequestError: there are too many.
    """
    united: set[Label] = set()
    for part in parts:
        united.update(part)
        _refuse_too_many(len(united), most, what)
    return LabelSpace(names=tuple(sort_labels(united)))


def _refuse_too_many(count: int, most: int, what: str) -> None:
    if count > most:
        raise RequestError(
            f"data.labels: column {what!r} has more than {most} labels; is it a number to predict (say its type float in "
            "data.types)? Otherwise raise data.labels.most"
        )


def labels_of(table: Table, name: str, *, where: str) -> tuple[list[Any], NDArray[np.int64]]:
    """The distinct labels of a column, and each row's place among them.

    Raises:
        RequestError: a label is missing, or the column holds no labels.
    """
    groups = group_rows(table[name], where=where)
    labels = [int(label) if isinstance(label, bool) else label for label in groups.names]
    if any(not isinstance(label, _KINDS) for label in labels):
        raise RequestError(
            f"{where}: column {name!r} is {table.schema[name].kind}, and labels are texts or whole numbers"
        )
    return labels, groups.codes


def count_labels(labels: Sequence[Any], codes: NDArray[np.int64]) -> dict[Any, int]:
    """Rows of each of the distinct labels."""
    return dict(zip(labels, np.bincount(codes, minlength=len(labels)).tolist(), strict=True))


def choose_labels(
    counts: Mapping[str, Mapping[Any, int]], config: LabelsConfig, *, what: str, where: str
) -> tuple[LabelSpace, dict[str, int]]:
    """The vocabulary of a run, and how many rows of every split have a label that is not in it.

    Args:
        counts: rows of each label, by the splits, the training rows' first; only those make the vocabulary.
        config: what becomes of other labels.
        what: the column.
        where: the data, for messages.

    Raises:
        RequestError: there are too many labels, or a held-out one is unknown and that is not allowed.
    """
    first, *others = counts
    space = unite_labels([counts[first]], most=config.most, what=what)
    if config.unknown == "append":
        for split in others:
            space = space.append(counts[split], most=config.most, what=what)
    known, unknown = set(space.names), {}
    for split, found in counts.items():
        strange = sort_labels(label for label in found if label not in known)
        unknown[split] = sum(found[label] for label in strange)
        if strange and config.unknown == "refuse":
            raise RequestError(
                f"the {split} split of {where} has {unknown[split]} rows with labels of {what!r} that no training row has, "
                f'{strange[0]!r} the first; cut by = "label", or set data.labels.unknown = "count" or "append"'
            )
    return space, unknown
