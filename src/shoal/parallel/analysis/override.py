"""The recipe's ``[parallel]`` table applied to what was found: it wins, and it is checked in plain words.

A pattern is a module path in which ``*`` stands for one part: ``blocks.*.mlp.up``.
"""

import fnmatch
from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from shoal.core.errors import RequestError, nearest
from shoal.parallel.analysis.structure import ParallelConfig, Split, SplitKind, SplitWord
from shoal.parallel.analysis.trace import is_linear
from shoal.parallel.analysis.vocabulary import shared_parameters

Pairing = tuple[Sequence[str], Sequence[str]]
"""Column layers, and the row layers that sum their features up."""


def match_blocks(model: nn.Module, patterns: Iterable[str]) -> list[tuple[str, ...]]:
    """One row of block paths per pattern.

    Raises:
        RequestError: a pattern matches no module.
    """
    return [tuple(match_paths(model, pattern, key="parallel.blocks")) for pattern in patterns]


def match_paths(model: nn.Module, pattern: str, *, key: str) -> list[str]:
    """The module paths that a pattern stands for, in the order of modules.

    Raises:
        RequestError: there is none; the nearest path is named.
    """
    paths = [path for path, _ in model.named_modules() if path]
    parts = pattern.split(".")
    found = [path for path in paths if _matches(path.split("."), parts)]
    if not found:
        close = nearest(pattern, paths)
        advice = f"the nearest path is {close!r}" if close else f"paths are such as {', '.join(map(repr, paths[:3]))}"
        raise RequestError(f"{key}: {pattern!r} matches no module of {type(model).__name__}; {advice}")
    return found


def apply_split_table(
    model: nn.Module,
    found: dict[str, Split],
    config: ParallelConfig,
    *,
    pairings: Sequence[Pairing],
    traced: Sequence[Pairing],
) -> tuple[dict[str, Split], dict[str, str]]:
    """The splits after the recipe's table, and the layers that it leaves whole, with the reason.

    Args:
        model: the module.
        found: its splits by path.
        config: the table.
        pairings: the pairs among the splits.
        traced: every pair that the trace saw, split or not.

    Raises:
        RequestError: a pattern matches nothing, a kind does not suit its layer, or a column has no row.
    """
    wanted: dict[str, SplitWord] = {}
    for pattern, word in config.split.items():
        for path in match_paths(model, pattern, key="parallel.split"):
            wanted[path] = word
    if not wanted:
        return found, {}
    splits, dropped = dict(found), dict[str, str]()
    for path, word in wanted.items():
        if word == "none":
            splits.pop(path, None)
            dropped[path] = "parallel.split says none"
            continue
        _check_kind(path, model.get_submodule(path), word)
        parts = found[path].parts if path in found else 1
        splits[path] = Split(path=path, kind=SplitKind(word), parts=parts)
    _drop_broken_pairs(splits, dropped, wanted, pairings)
    _check_pairs(splits, wanted, traced)
    _keep_ties(model, splits, dropped)
    return splits, dropped


def _matches(path: list[str], pattern: list[str]) -> bool:
    return len(path) == len(pattern) and all(map(fnmatch.fnmatchcase, path, pattern))


def _check_kind(path: str, module: nn.Module, word: str) -> None:
    wants_embedding = word == SplitKind.VOCABULARY
    is_right = isinstance(module, nn.Embedding) if wants_embedding else is_linear(module)
    if not is_right:
        needed = "an nn.Embedding" if wants_embedding else "an nn.Linear"
        raise RequestError(
            f"parallel.split: {path!r} = {word!r} needs {needed}, and its class is {type(module).__name__}; "
            f"name such a layer, or remove the line"
        )


def _drop_broken_pairs(
    splits: dict[str, Split], dropped: dict[str, str], wanted: Mapping[str, str], pairings: Sequence[Pairing]
) -> None:
    """A pair that the table took a layer from is left whole, but for the layers that the table names itself."""
    for columns, rows in pairings:
        kinds = dict.fromkeys(columns, SplitKind.COLUMN) | dict.fromkeys(rows, SplitKind.ROW)
        changed = [path for path, kind in kinds.items() if path not in splits or splits[path].kind is not kind]
        if not changed:
            continue
        for path in kinds:
            if path not in wanted and path in splits:
                del splits[path]
                dropped[path] = f"parallel.split took its partner {changed[0]} away"


def _check_pairs(splits: dict[str, Split], wanted: Mapping[str, str], traced: Sequence[Pairing]) -> None:
    """Refuse a column or row layer of the table without its partners: those that the trace saw, else one near it."""
    for path, word in wanted.items():
        if word not in ("column", "row"):
            continue
        partner = SplitKind.ROW if word == "column" else SplitKind.COLUMN
        known = [
            rows if word == "column" else columns for columns, rows in traced if path in (columns, rows)[word == "row"]
        ]
        needed = list(dict.fromkeys(other for others in known for other in others))
        missing = [other for other in needed if other not in splits or splits[other].kind is not partner]
        near = [split.path for split in splits.values() if split.kind is partner and _is_near(split.path, path)]
        if missing if needed else not near:
            named = f"name {', '.join(map(repr, missing))}" if missing else "name its partner"
            raise RequestError(
                f"parallel.split: {path!r} is a {word} layer without its {partner.value} layer: "
                f"the output of a column layer stays split until a row layer sums it up; "
                f"{named} as {partner.value}, or set {path!r} to none"
            )


def _keep_ties(model: nn.Module, splits: dict[str, Split], dropped: dict[str, str]) -> None:
    """One weight of two layers is split in both or in neither."""
    for names in shared_parameters(model):
        owners = [name.rpartition(".")[0] for name in names]
        layers = [path for path in owners if isinstance(model.get_submodule(path), nn.Embedding | nn.Linear)]
        whole = [path for path in layers if path not in splits]
        for path in layers if whole else ():
            if splits.pop(path, None) is not None:
                dropped[path] = f"its weight is that of {whole[0]}, which stays whole"


def _is_near(one: str, other: str) -> bool:
    """True for layers of one module, or of neighbouring ones."""
    first, second = one.split(".")[:-1], other.split(".")[:-1]
    return first == second or first[:-1] == second[:-1]
