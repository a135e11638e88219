"""Names are the field's words: those of our former dialect are in no name of a file, a class, a function, an argument or a field.

A name is cut into its words (``snake_case`` and ``CamelCase``). Some words are the field's too, in another sense (``gather``, the
lanes of a drawing, a round of a tournament), so a word is refused either in every name, or as the whole of a name, or of a file.
"""

import ast
import re
from collections.abc import Iterator
from itertools import pairwise

import pytest

# In no name at all: the former word, and what to say instead.
EVERYWHERE = {
    "scatter_sum": "reduce_scatter",
    "largest_": "all_reduce_max_",
    "ledger": "traffic counter, update log, command log",
    "nursery": "fork client",
    "cradle": "fork server",
    "lifeline": "parent-death signal",
    "story": "failure report",
    "verdict": "blame",
    "remark": "warning",
    "remarks": "warnings",
    "anatomy": "module analysis",
    "look_at": "analyse",
    "laid": "layout",
    "placed": "parallel model",
    "keeper": "owner",
    "laying": "parallelize",
    "passenger": "piggybacked scalar",
    "passengers": "piggybacked scalars",
    "riding": "piggybacked",
    "mail": "point-to-point",
    "parcel": "message",
    "parcels": "messages",
    "desk": "step state",
    "stretch": "slice, range",
    "stretches": "slices, ranges",
    "company": "together",
    "crew": "job",
    "launchcrew": "job",
    "crewfolder": "job directory",
    "steward": "log leader",
    "portion": "work unit, batch share",
    "portions": "work units, batch shares",
    "handout": "work queue",
    "contribution": "push",
    "contributions": "pushes",
    "shelf": "shard store",
    "door": "admission",
    "patience": "timeouts",
    "bell": "event",
    "lending": "snapshot read",
    "relay": "replication",
    "seat": "coordinator",
    "seats": "coordinators",
    "tidings": "notices",
    "herald": "notifier",
    "tally": "dropped-message count",
    "cutsave": "checkpointing",
    "lane": "bulk stream",
    "lanes": "bulk streams",
    "dock": "listener",
    "pump": "reader",
    "incarnation": "instance id",
    "incarnations": "instance ids",
    "wish": "stop request",
    "actor": "rehearsal worker",
    "heats": "successive halving",
    "witness": "run profiler",
    "foretold": "forecast report",
    "deciding": "plan choice",
    "plants": "planted bugs",
    "question": "request",
    "survey": "observation",
}
# As the whole name of a class, a function, an argument or a field, because other names may well have them.
WHOLE_NAMES = {
    "sum_": "all_reduce_",
    "account": "traffic counter",
    "Account": "TrafficCounter",
    "Board": "StatusBoard",
    "RankSlot": "RankStatus",
    "Keep": "owner",
    "Held": "rank state",
    "Laid": "layout",
    "Book": "update log",
    "Line": "loop thread",
    "Round": "update",
    "Seat": "coordinator",
}
# As the name of a file.
FILES = {
    "forked": "child setup",
    "find": "analysis",
    "held": "rank state",
    "keep": "owner",
    "row": "sequence, list",
    "board": "status_board",
    "slot": "rank_status",
    "tell": "log",
    "book": "update log",
    "following": "log follower",
    "round": "update",
    "rounds": "updates",
    "workline": "loop thread",
    "drive": "L-BFGS driver",
    "dealing": "scatter and collect",
    "leading": "group leader",
    "ahead": "overlap",
    "hanging": "hang watchdog",
    "warming": "preload",
    "centering": "center process",
    "closing": "finalize",
    "windows": "deduplication",
    "cast": "rehearsal pool",
    "uses": "weight uses",
    "stream": "asynchronous pipeline",
    "dropped": "randomness/",
}
# Rooms in which such a word is the field's: lanes of a drawing, a plateau's patience, an action placed in a table, rounds of a
# collective, an account of SLURM, an actor of Ray, the view that tells what happened.
ELSEWHERE = {
    "account": ("launch", "cli"),
    "actor": ("launch",),
    "lane": ("schedules", "planner"),
    "lanes": ("schedules", "planner"),
    "patience": ("engine", "optim"),
    "placed": ("schedules",),
    "rounds": ("comm",),
    "story": ("dashboard",),
}

_CAMEL = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|[0-9]+")


def words_of(name: str) -> set[str]:
    """The words of a name, and each two neighbours of them, as ``look_at``."""
    words = [word.lower() for part in name.split("_") for word in _CAMEL.findall(part)]
    return {*words, *(f"{one}_{other}" for one, other in pairwise(words)), name}


def names_in(module) -> Iterator[tuple[int, str]]:
    """Every name that a module gives to something that outlives a function, with its line."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name
        if isinstance(node, ast.arg):
            yield node.lineno, node.arg
        if isinstance(node, ast.ClassDef | ast.Module):
            for statement in node.body:
                targets = statement.targets if isinstance(statement, ast.Assign) else []
                if isinstance(statement, ast.AnnAssign):
                    targets = [statement.target]
                yield from ((target.lineno, target.id) for target in targets if isinstance(target, ast.Name))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def word_problems(module) -> Iterator[str]:
    for part in module.name.split("."):
        for word, instead in {**EVERYWHERE, **FILES}.items():
            is_there = part == word or (word in EVERYWHERE and word in words_of(part))
            if is_there and module.room not in ELSEWHERE.get(word, ()):
                yield f"{module.path}: is called {part!r}; say {instead}"
    for line, name in names_in(module):
        bare = name.strip("_") if name.strip("_") else name
        found = {word for word in words_of(name) if word in EVERYWHERE}
        found |= {whole for whole in (name, bare) if whole in WHOLE_NAMES}
        for word in sorted(found):
            if module.room in ELSEWHERE.get(word, ()):
                continue
            yield f"{module.path}:{line}: {name!r} has {word!r}; say {({**EVERYWHERE, **WHOLE_NAMES})[word]}"


def test_names_are_the_fields_words(modules, scripts):
    assert [problem for module in [*modules, *scripts] for problem in word_problems(module)] == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("shoal.paramserver.steward", ""),
        ("shoal.serverrun.crew_folder", ""),
        ("shoal.trainer.ahead", ""),
        ("shoal.core.x", "class StopWish: ..."),
        ("shoal.core.x", "class Account: ..."),
        ("shoal.core.x", "def look_at(model): ..."),
        ("shoal.core.x", "def run(*, crew_size): ..."),
        ("shoal.core.x", "class A:\n    parcel: int"),
        ("shoal.core.x", "class A:\n    def __init__(self):\n        self._passengers = 1"),
        ("shoal.core.x", "async def scatter_sum(x): ..."),
        ("shoal.core.x", "TIDINGS = 1"),
        ("shoal.comm.x", "class Lane: ..."),
    ],
)
def test_a_word_of_the_dialect_is_refused(plant, name, text):
    assert len(list(word_problems(plant(name, text)))) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("shoal.comm.x", "def all_gather(row, keep, crewed): ..."),
        ("shoal.core.x", "def f():\n    witness = 1"),
        ("shoal.core.x", "class StatusBoard:\n    gather: int\n    lookup: int"),
        ("shoal.core.stretchy", "import x"),
        ("shoal.schedules.x", "class Lane: ..."),
    ],
)
def test_a_word_of_the_field_is_not(plant, name, text):
    assert list(word_problems(plant(name, text))) == []
