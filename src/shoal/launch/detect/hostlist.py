"""SLURM's short forms: lists of hosts such as ``rack[0-1]n[01-02],login`` and counts per host such as ``2(x3),1``. Pure.

A name may have several brackets, and a number keeps the zeros in front of it. Both are read wrongly elsewhere: who knows
one bracket finds a host ``rack0`` in the list above, which does not exist. What is not understood is refused, never guessed.
"""

import itertools
import re

from shoal.core.errors import RequestError

_MOST_HOSTS = 1 << 16
"""A list that names more is taken for a mistake: it is expanded in memory."""
_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand_hosts(text: str) -> list[str]:
    """All hosts of a list, in its order.

    Raises:
        RequestError: it is not such a list, or names more than 65,536 hosts.
    """
    found: list[str] = []
    for word in _split(text):
        found += _expand(text, word)
        if len(found) > _MOST_HOSTS:
            raise RequestError(f"host list {text!r} names more than {_MOST_HOSTS} hosts")
    return found


def expand_counts(text: str) -> list[int]:
    """The numbers of processes per host, a number for each host.

    Raises:
        RequestError: it is not such a list.
    """
    found: list[int] = []
    for word in text.split(","):
        match = _COUNT.fullmatch(word)
        if match is None or int(match[2] or 1) > _MOST_HOSTS:
            raise RequestError(f"processes per host {text!r}: {word!r} is not a count such as 2 or 2(x3)")
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _split(text: str) -> list[str]:
    """The words between the commas that are outside brackets."""
    words, depth = [""], 0
    for letter in text:
        if letter == "," and depth == 0:
            words.append("")
            continue
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise RequestError(f"host list {text!r}: a bracket is not closed, or closed twice; write rack[0-1]n[01-02]")
        words[-1] += letter
    if depth or not all(words):
        raise RequestError(f"host list {text!r}: a bracket is not closed, or a name is empty; write n[01-02],n07")
    return words


def _expand(text: str, word: str) -> list[str]:
    """The hosts of one word in SLURM's order: the last bracket runs fastest, and of the others the first."""
    pieces = re.split(r"\[([^\]]*)\]", word)
    if len(pieces) > 1 and pieces[-1]:
        raise RequestError(
            f"host list {text!r}: SLURM knows no name that goes on after its last bracket, as {word!r} does"
        )
    choices: list[list[str]] = []
    for number, piece in enumerate(pieces):
        if number % 2:
            choices.append(_numbers(text, piece))
        elif _NAME.fullmatch(piece) is None:
            raise RequestError(f"host list {text!r}: {piece!r} is not a part of a host's name")
        else:
            choices.append([piece])
    total = 1
    for one in choices:
        total *= len(one)
    if total > _MOST_HOSTS:
        raise RequestError(f"host list {text!r} names more than {_MOST_HOSTS} hosts")
    if len(choices) == 1:
        return choices[0]
    *others, last, _ = choices
    heads = ["".join(reversed(parts)) for parts in itertools.product(*reversed(others))]
    return [head + number for head in heads for number in last]


def _numbers(text: str, inside: str) -> list[str]:
    """The numbers of a bracket, as they are written in names."""
    found: list[str] = []
    for word in inside.split(","):
        match = _RANGE.fullmatch(word)
        if match is None:
            raise RequestError(f"host list {text!r}: {word!r} in a bracket is not a number or a range such as 01-16")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first) or (len(last) < len(first)) or int(last) - int(first) >= _MOST_HOSTS:
            raise RequestError(f"host list {text!r}: the range {word} runs backwards, or is longer than {_MOST_HOSTS}")
        found += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return found
