"""Who mixes with whom in a round of gossip: weights of a mean over neighbours, as plain lists. No torch.

``mixing(graph, count, round)[i][j]`` is what island i takes of island j. For gossip every row and every column sums to 1, so the
mean over islands never moves; for push-sum every column does, which is what a sender alone can see to. A graph that is drawn is
drawn by the seed and the round, the same in every process.
"""

import json
import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

from shoal.core.errors import RequestError, did_you_mean
from shoal.core.seeding import derive_key

Matrix = list[list[float]]

_KEYS = ("islands", "edges")
_FORM = '{"islands": 4, "edges": [[0, 1], [1, 2], [2, 3]]}'
_MOST_SHOWN = 60


def mixing(graph: str, count: int, round_number: int, *, seed: int, is_directed: bool) -> Matrix:
    """The weights of one round.

    Args:
        graph: a name, or a file that ``read_graph`` reads.
        count: of the islands.
        round_number: from 0; graphs that change with time are of it.
        seed: of the run.
        is_directed: for push-sum, whose rows need not sum to 1.
    """
    if graph == "complete":
        return [[1.0 / count] * count for _ in range(count)]
    if graph == "ring":
        return _ring(count)
    if graph == "exponential":
        hop = 2 ** (round_number % max(1, math.ceil(math.log2(count))))
        return _halves([(place + hop) % count for place in range(count)])
    if graph == "random":
        return _halves(_draw(count, round_number, seed=seed, is_directed=is_directed))
    return read_graph(Path(graph), count, is_directed=is_directed)


def _ring(count: int) -> Matrix:
    """Both neighbours and oneself alike; two islands have one neighbour."""
    found = [[0.0] * count for _ in range(count)]
    for place in range(count):
        near = {place, (place + 1) % count, (place - 1) % count}
        for other in near:
            found[place][other] = 1.0 / len(near)
    return found


def _halves(receivers: Sequence[int]) -> Matrix:
    """Every island keeps one half of what it has and gives the other half to its receiver."""
    count = len(receivers)
    found = [[0.0] * count for _ in range(count)]
    for place, receiver in enumerate(receivers):
        found[place][place] += 0.5
        found[receiver][place] += 0.5
    return found


def _draw(count: int, round_number: int, *, seed: int, is_directed: bool) -> list[int]:
    """Whom each island gives to: for push-sum anybody else, for gossip a partner, and nobody where one is left over."""
    if is_directed:
        others = [derive_key(seed, "push-sum", round_number, place) % (count - 1) for place in range(count)]
        return [other + (other >= place) for place, other in enumerate(others)]
    order = sorted(range(count), key=lambda place: derive_key(seed, "gossip", round_number, place))
    receivers = list(range(count))
    for first, second in zip(order[::2], order[1::2], strict=False):
        receivers[first], receivers[second] = second, first
    return receivers


def read_graph(path: Path, count: int, *, is_directed: bool) -> Matrix:
    """The graph of a JSON file: ``{"islands": 4, "edges": [[0, 1], [1, 2], ...]}``.

    An edge of gossip goes both ways and is weighted by the larger degree of its ends (Metropolis weights), so that rows and
    columns sum to 1. An edge of push-sum goes from the first to the second, and an island divides what it has evenly among its
    receivers and itself.

    Raises:
        RequestError: the file is not one, is for another number of islands, or leaves some of them out of reach.
    """
    said, edges = _read_file(path)
    if said != count:
        raise RequestError(f"graph {path} is of {said} islands, and the plan has {count}; give a graph of {count}")
    for edge in edges:
        if not all(0 <= end < count for end in edge) or edge[0] == edge[1]:
            raise RequestError(
                f"graph {path}: edge {list(edge)} is not between two of the islands 0 to {count - 1}; mend or leave out the edge"
            )
    arcs = set(edges) if is_directed else {arc for first, second in edges for arc in ((first, second), (second, first))}
    _refuse_unreached(path, arcs, count)
    return _push_weights(arcs, count) if is_directed else _metropolis(arcs, count)


def _read_file(path: Path) -> tuple[int, list[tuple[int, int]]]:
    """The number of islands and the edges that a file says.

    Raises:
        RequestError: it is no such file; says what is wrong with it.
    """
    form = f"graph {path} must be of the form {_FORM}"
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        raise RequestError(f"graph {path} cannot be read: {error.strerror}; give the path of a JSON file") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{form}, and it is no text") from error
    except ValueError as error:
        raise RequestError(f"{form}, and it is no JSON: {error}") from error
    if not isinstance(values, dict):
        raise RequestError(f"{form}, and it holds {_told(values)}")
    for key in values:
        if key not in _KEYS:
            raise RequestError(f"{form}, and it has a key {key!r}; {did_you_mean(key, _KEYS)}")
    for key in _KEYS:
        if key not in values:
            raise RequestError(f"{form}, and it has no {key!r}; add it")
    said, edges = values["islands"], values["edges"]
    if type(said) is not int:
        raise RequestError(f"{form}, and its islands are {_told(said)}; give their number")
    if not isinstance(edges, list):
        raise RequestError(f"{form}, and its edges are {_told(edges)}; give a list of pairs of islands")
    for edge in edges:
        if not isinstance(edge, list) or len(edge) != 2 or any(type(end) is not int for end in edge):
            raise RequestError(
                f"{form}, and it has the edge {_told(edge)}; give the numbers of two islands, such as [0, 1]"
            )
    return said, [(first, second) for first, second in edges]


def _told(value: object) -> str:
    """A value as the file has it, cut where it is long."""
    text = json.dumps(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _refuse_unreached(path: Path, arcs: set[tuple[int, int]], count: int) -> None:
    """Refuse a graph in which what an island learns does not come to all others, or theirs not to it."""
    for reverse in (False, True):
        reached, found = {0}, [0]
        while found:
            here = found.pop()
            for arc in arcs:
                start, end = (arc[1], arc[0]) if reverse else arc
                if start == here and end not in reached:
                    reached.add(end)
                    found.append(end)
        if len(reached) < count:
            missing = sorted(set(range(count)) - reached)
            how = "do not reach" if reverse else "are not reached from"
            raise RequestError(
                f"graph {path} is not connected: island(s) {', '.join(map(str, missing))} {how} island 0; add an edge"
            )


def _metropolis(arcs: set[tuple[int, int]], count: int) -> Matrix:
    degree = [sum(start == place for start, _ in arcs) for place in range(count)]
    exact = [[Fraction(0)] * count for _ in range(count)]
    for start, end in arcs:
        exact[start][end] = Fraction(1, 1 + max(degree[start], degree[end]))
    for place in range(count):
        exact[place][place] = 1 - sum(exact[place], Fraction(0))
    return [[float(weight) for weight in row] for row in exact]


def _push_weights(arcs: set[tuple[int, int]], count: int) -> Matrix:
    found = [[0.0] * count for _ in range(count)]
    for sender in range(count):
        receivers = [sender, *(end for start, end in arcs if start == sender)]
        for receiver in receivers:
            found[receiver][sender] = 1.0 / len(receivers)
    return found
