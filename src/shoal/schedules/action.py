"""One cell of a schedule: what a stage does with a microbatch. Prints and parses as ``2F0``.

Two actions that a rank overlaps share one cell and print as ``torch.distributed.pipelining`` writes them:
``(0F4;7B1)OVERLAP_F_B``.
"""

import re
from dataclasses import dataclass
from enum import StrEnum

from shoal.core.errors import RequestError

_OVERLAP = "OVERLAP_F_B"
_ACTION = re.compile(r"([0-9]+)([FBIW])([0-9]+)")
_PAIR = re.compile(r"\(([^;()]+);([^;()]+)\)" + _OVERLAP)


class Kind(StrEnum):
    """What is computed."""

    FORWARD = "F"
    BACKWARD = "B"
    """Whole: gradients of the input and of the weights."""
    INPUT = "I"
    """The gradient of the input alone: what the stage before waits for."""
    WEIGHT = "W"
    """The gradient of the weights, which nobody waits for."""


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One stage's work on one microbatch."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Cell = tuple[Action, ...]
"""One action, or a forward and a backward that overlap."""


def parse_action(text: str) -> Action:
    """Read ``2F0``.

    Raises:
        RequestError: it is no action.
    """
    match = _ACTION.fullmatch(text.strip())
    if match is None:
        raise RequestError(
            f"{text.strip()!r} is no action; write stage, one of F, B, I, W, and microbatch, such as 2F0"
        )
    stage, kind, microbatch = match.groups()
    return Action(int(stage), Kind(kind), int(microbatch))


def parse_cell(text: str) -> Cell:
    """Read ``2F0`` or ``(0F4;7B1)OVERLAP_F_B``.

    Raises:
        RequestError: it is neither.
    """
    match = _PAIR.fullmatch(text.strip())
    return (parse_action(match[1]), parse_action(match[2])) if match else (parse_action(text),)


def write_cell(cell: Cell) -> str:
    """The reverse of ``parse_cell``."""
    return str(cell[0]) if len(cell) == 1 else f"({';'.join(map(str, cell))}){_OVERLAP}"
