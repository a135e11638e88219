"""Which parameters are hot, those that the recipe names by name or pattern, and how the model is cut over the servers then.

What is measured decides nothing here: servers and workers must cut alike before the first gradient is known.
"""

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

from shoal.core.errors import RequestError, nearest
from shoal.paramserver.config import ParamServerConfig
from shoal.paramserver.cutting import Model, ShardMap, cut_model

MEASURED = "measured"
"""As ``paramserver.hot``: found out from gradients."""


def match_hot(patterns: Iterable[str], names: Collection[str]) -> frozenset[str]:
    """The parameters that the patterns name.

    Raises:
        RequestError: a pattern matches none.
    """
    found: set[str] = set()
    for pattern in patterns:
        matched = {name for name in names if fnmatchcase(name, pattern)}
        if not matched:
            raise RequestError(f"paramserver.hot {pattern!r} is no parameter of this model; {_meant(pattern, names)}")
        found |= matched
    return frozenset(found)


def _meant(pattern: str, names: Collection[str]) -> str:
    if nearest(pattern, [MEASURED, *names]) == MEASURED:
        return f"did you mean {MEASURED!r}?"
    close = nearest(pattern, names)
    first = next(iter(sorted(names)), "")
    return (
        f"did you mean {close!r}?"
        if close
        else f"it has {len(names)}, such as {first!r}; a pattern has *, or give {MEASURED!r}"
    )


def cut_for(model: Model, num_shards: int, *, config: ParamServerConfig, optimizer: str) -> ShardMap:
    """The shards of a run; servers and workers must cut alike.

    Args:
        model: the trained parameters.
        num_shards: servers.
        config: what is hot, and how gradients are joined.
        optimizer: its name.

    Raises:
        RequestError: the model cannot be cut so.
    """
    hot = match_hot(() if config.hot == MEASURED else config.hot, model)
    # Adasum's dot products are of whole tensors.
    return cut_model(model, num_shards, hot=hot, optimizer=optimizer, whole_tensors=config.aggregate == "adasum")
