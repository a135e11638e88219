"""What the doctor says about one thing: a frozen value, so that checks are decided in one file and printed in another."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class State(StrEnum):
    """How a check came out."""

    OK = "ok"
    NOTE = "note"
    """Runs go on, but slower or with less than there could be."""
    WRONG = "wrong"
    """Something will fail, or was left behind; the check's advice says what to do."""
    FIXED = "fixed"
    """It was wrong and ``--fix`` mended it."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing looked at: what was found and, unless that is fine, what is wrong with it and what to do."""

    name: str
    state: State
    found: str
    advice: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    """The numbers behind ``found``, for programs."""


def judge(name: str, found: str, *, values: dict[str, Any], wrong: str | None = None, note: str | None = None) -> Check:
    """A check whose state follows from what there is to say: wrong before note, note before ok."""
    state = State.WRONG if wrong else State.NOTE if note else State.OK
    return Check(name=name, state=state, found=found, advice=wrong or note or "", values=values)
