"""What ``[data.cut]`` of a recipe can say. No torch."""

import re
from typing import Literal, Self

from pydantic import model_validator

from shoal.core.config import Config

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_NEEDS_KEY = ("time", "user", "item", "key", "label", "behaviour")


class CutConfig(Config):
    """How rows are divided into training, validation and test; the shares are ``data.validation`` and ``data.test``."""

    by: Literal["rows", "time", "user", "item", "key", "label", "behaviour", "hash"] = "rows"
    """rows: each row by itself, mixed; time: the latest rows are held out; user, item, key: all rows of one key on one side;
    label, behaviour: every value in the same share on every side; hash: by a hash of the key, so that later rows move nothing."""
    key: str | None = None
    """The column that is meant: the time, the user, the label."""
    id: str | None = None
    """With by = "time": orders rows of one time; by their places when left out."""
    gap: float | str = 0
    """With by = "time": nothing within this of the first row that is held out is trained on; a number in the column's own
    unit, or of a time "36h", "7d"."""
    backwards: Literal["refuse", "sort"] = "refuse"
    """With by = "time": what is done where a row is earlier than the one before it."""
    split_heavy: bool = False
    """With user, item or key: a key with more rows than a side's share may be on several sides. The proof then names it."""
    seed: int = 0
    """Another one divides otherwise; it is no part of train.seed, so that runs with other seeds hold out the same rows."""

    @model_validator(mode="after")
    def _need_a_key(self) -> Self:
        if self.by in _NEEDS_KEY and self.key is None:
            raise ValueError(f'by = "{self.by}" needs key, the name of a column')
        if self.by == "rows" and self.key is not None:
            raise ValueError(
                f'by = "rows" looks at no column, and key is {self.key!r}; say by = "key", or leave it out'
            )
        if isinstance(self.gap, str):
            gap_seconds(self.gap)
        if self.gap != 0 and self.by != "time":
            raise ValueError('gap is for by = "time"; leave it out')
        return self


def gap_seconds(text: str) -> float:
    """A duration as people write it.

    Raises:
        ValueError: it is none.
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhdw])", text.strip())
    if found is None:
        raise ValueError(
            f'gap {text!r} is no duration; write a number, or one with s, m, h, d or w behind it, such as "36h"'
        )
    return float(found[1]) * _UNITS[found[2]]
