"""How ``stream`` cuts a model into fragments: whole layers, strided, so that each fragment has early and late ones. No torch.

A layer is what shares a name up to the first number in it (``blocks.3``), or without a number the module (``embedding``).
Numbered layers come first, in the order of their numbers, then the others by name; fragment p of F has the layers p, p + F,
p + 2F, ... (Douillard et al. 2025, arXiv 2501.18512, the strided pattern). Names decide alone, so every plan cuts alike.
"""

from collections.abc import Iterable

from shoal.core.errors import RequestError
from shoal.core.syncrule import SyncRule

_Place = tuple[bool, str, int]
"""Without a number; the name, before the number where there is one; the number."""


def cut_fragments(names: Iterable[str], count: int) -> list[frozenset[str]]:
    """The parameters of each of so many fragments.

    Args:
        names: of all trained parameters of the model.
        count: of fragments.
    """
    places = {name: _place(name) for name in names}
    numbers = {place: number for number, place in enumerate(sorted(set(places.values())))}
    return [
        frozenset(name for name, place in places.items() if numbers[place] % count == fragment)
        for fragment in range(count)
    ]


def count_layers(names: Iterable[str]) -> int:
    """The layers that parameters are of."""
    return len({_place(name) for name in names})


def check_fragments(rule: SyncRule, names: Iterable[str]) -> None:
    """Refuse more fragments than the model has layers with trained parameters.

    Raises:
        RequestError: gives both numbers.
    """
    num_layers = count_layers(names)
    if rule.fragments > num_layers:
        raise RequestError(
            f"sync={rule} cuts the model into {rule.fragments} fragments of whole layers, and {num_layers} of its layers have "
            f"trained parameters; use {num_layers} fragments or fewer"
        )


def _place(name: str) -> _Place:
    *modules, _ = parts = name.split(".")
    for at, part in enumerate(modules):
        if part.isdecimal():
            return False, ".".join(parts[:at]), int(part)
    # A parameter of the model itself is a layer of its own.
    return True, ".".join(modules) or name, 0
