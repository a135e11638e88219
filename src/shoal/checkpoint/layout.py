"""The names inside a ``checkpoints`` folder, written and parsed in one place.

::

    step-00000100/                              a committed checkpoint
        manifest.json  rank-000.safetensors ...
        good                                    empty, there once a step was taken from this checkpoint
    .tmp-step-00000100-<id>/                    being written, or left by a save that died
    .replaced-step-00000100-<id>/               what had that name before a save took it
    .expired-step-00000050-<id>/                being deleted by retention
    .aside-step-00000100-<id>/                  a whole one from which no step could be taken; nobody goes on from it

Only a rename gives a folder its committed name, and an id is drawn anew for every save.
"""

import re
import secrets
from dataclasses import dataclass
from enum import StrEnum

MANIFEST = "manifest.json"
GOOD = "good"

_STEP = re.compile(r"step-([0-9]{8,18})", re.ASCII)
_BESIDE = re.compile(r"\.(tmp|replaced|expired|aside)-(step-[0-9]{8,18})-([0-9a-f]{16})", re.ASCII)
_SHARD = re.compile(r"rank-[0-9]{3,6}\.safetensors", re.ASCII)
_ID = re.compile(r"[0-9a-f]{16}", re.ASCII)


class Beside(StrEnum):
    """Why a folder stands beside the committed ones."""

    DRAFT = "tmp"
    REPLACED = "replaced"
    EXPIRED = "expired"
    ASIDE = "aside"


@dataclass(frozen=True, kw_only=True)
class BesideName:
    """A parsed name of a folder beside the committed ones."""

    kind: Beside
    step: int
    id: str


def draw_id() -> str:
    """An id that no save had before."""
    return secrets.token_hex(8)


def is_id(text: str) -> bool:
    """True for what ``draw_id`` can give."""
    return _ID.fullmatch(text) is not None


def step_name(step: int) -> str:
    """``100`` -> ``step-00000100``."""
    return f"step-{step:08d}"


def parse_step(name: str) -> int | None:
    """The step of a committed folder's name; None for every other name, also for one that ``step_name`` would write otherwise."""
    match = _STEP.fullmatch(name)
    if match is None or step_name(int(match[1])) != name:
        return None
    return int(match[1])


def shard_name(rank: int) -> str:
    """``0`` -> ``rank-000.safetensors``."""
    return f"rank-{rank:03d}.safetensors"


def is_shard_name(name: str) -> bool:
    """True for a plain name of a shard: no folder, no dots that lead elsewhere."""
    return _SHARD.fullmatch(name) is not None


def beside_name(kind: Beside, step: int, id: str) -> str:
    """The name of a folder that stands beside the committed ones."""
    return f".{kind.value}-{step_name(step)}-{id}"


def parse_beside(name: str) -> BesideName | None:
    """The parts of such a name, or None for a name that is not ours."""
    match = _BESIDE.fullmatch(name)
    if match is None:
        return None
    step = parse_step(match[2])
    return None if step is None else BesideName(kind=Beside(match[1]), step=step, id=match[3])
