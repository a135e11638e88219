"""Where a module may be cut: tried on an example, in the plain module, which is left as it was.

Whether a stage may begin at a unit does not depend on where other stages begin: everything from there on must follow from what
that unit is given and from the model's own inputs. So places are tried one at a time, and only those that a cut would use.
"""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from shoal.core.errors import RequestError
from shoal.pipeline.cut import Chain, IllegalCut
from shoal.pipeline.units import Unit

_MOST_TRIED = 64
"""Places that are tried for a message; every one of them takes a few forward passes of the example."""
_MOST_NAMED = 8


def find_illegal(
    model: nn.Module, units: Sequence[Unit], starts: Sequence[int], example: tuple[Tensor, ...]
) -> IllegalCut | None:
    """What is wrong with a cut, with the first place that is; None where it is right."""
    chain = Chain(model, units, starts)
    try:
        chain.prove(example)
    except IllegalCut as error:
        return error
    finally:
        chain.undo()
    return None


def choose_legal(
    propose: Callable[[frozenset[int]], tuple[int, ...]],
    model: nn.Module,
    units: Sequence[Unit],
    example: tuple[Tensor, ...],
) -> tuple[int, ...]:
    """The best cut of which every place is legal.

    Args:
        propose: gives the best cut that begins no stage at these units.
        model: the whole module.
        units: its chain of calls.
        example: its inputs.

    Raises:
        RequestError: there is none; names the places that are legal and says what is wrong with another.
    """
    illegal: dict[int, IllegalCut] = {}
    while True:
        try:
            starts = propose(frozenset(illegal))
        except RequestError:
            if not illegal:
                raise
            raise _describe(propose, illegal[min(illegal)], model, units, example) from None
        found = find_illegal(model, units, starts, example)
        if found is None:
            return starts
        alone = _illegal_alone(model, units, starts, example) if len(starts) > 2 else {}
        # Where every place is legal by itself and all together are not, the message's own is the best guess.
        new = alone or {found.start: found}
        assert illegal.keys().isdisjoint(new), "a place that was excluded was proposed again"
        illegal |= new


def _illegal_alone(
    model: nn.Module, units: Sequence[Unit], starts: Sequence[int], example: tuple[Tensor, ...]
) -> dict[int, IllegalCut]:
    """The places of a cut that are illegal whatever the others are: an error on the way may come of another than it names."""
    tried = {place: find_illegal(model, units, (0, place), example) for place in starts[1:]}
    return {place: found for place, found in tried.items() if found is not None}


def _describe(
    propose: Callable[[frozenset[int]], tuple[int, ...]],
    first: IllegalCut,
    model: nn.Module,
    units: Sequence[Unit],
    example: tuple[Tensor, ...],
) -> RequestError:
    """Why there is no cut, by the places that are legal alone."""
    legal = _legal_places(model, units, example)
    try:
        propose(frozenset(range(1, len(units))) - frozenset(legal))
    except RequestError as error:
        return RequestError(f"{error}. At another place: {first}")
    raise AssertionError("fewer places gave a cut where more did not")


def _legal_places(model: nn.Module, units: Sequence[Unit], example: tuple[Tensor, ...]) -> list[int]:
    tried = [place for place, unit in enumerate(units) if place > 0 and unit.is_once][:_MOST_TRIED]
    return [place for place in tried if find_illegal(model, units, (0, place), example) is None]


def name_legal(model: nn.Module, units: Sequence[Unit], example: tuple[Tensor, ...]) -> str:
    """A sentence with the places where a stage can begin."""
    legal = [units[place].path for place in _legal_places(model, units, example)]
    if not legal:
        return "There is no unit at which this module can be cut: leave pp out"
    more = f" and {len(legal) - _MOST_NAMED} more" if len(legal) > _MOST_NAMED else ""
    return f"Stages can begin at {', '.join(map(repr, legal[:_MOST_NAMED]))}{more}"
