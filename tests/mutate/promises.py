"""The promises of ``docs/guarantees.md``, row by row, and whether the list of mutations still fits them and the source."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One line of the source, broken, and the test that has to notice."""

    promise: str
    """Words that are in the first cell of exactly one row of the guarantees."""
    what: str
    """What is broken, in a few words."""
    file: str
    old: str
    """Occurs exactly once in the file."""
    new: str
    test: str
    """A pytest node that passes, and fails with the mutation."""
    seconds: int = 10
    """What the test takes, about, on two idle cores."""


def read_promises(guarantees: str) -> list[str]:
    """The first cell of every row of every table whose first column is named ``promise``."""
    found, is_inside = [], False
    for line in guarantees.splitlines():
        if not line.startswith("|"):
            is_inside = False
        elif line.startswith("| promise |"):
            is_inside = True
        elif is_inside and not line.startswith("|---"):
            found.append(line.strip("| ").split(" | ")[0])
    return found


def promise_problems(
    promises: Sequence[str], mutations: Sequence[Mutation], without: Mapping[str, str]
) -> Iterator[str]:
    """Words that name no row or several, and rows that nothing is said of."""
    keys = [*(mutation.promise for mutation in mutations), *without]
    for key in dict.fromkeys(keys):
        num_rows = sum(key in promise for promise in promises)
        if num_rows != 1:
            yield f"{key!r} is in {num_rows} rows of the guarantees, not in one"
    for promise in promises:
        if not any(key in promise for key in keys):
            yield f"no mutation and no reason for: {promise}"


def mutation_problems(root: Path, mutations: Sequence[Mutation]) -> Iterator[str]:
    """Mutations that cannot be applied, or whose test is not there."""
    for mutation in mutations:
        path = root / mutation.file
        num_found = path.read_text().count(mutation.old) if path.is_file() else 0
        if num_found != 1:
            yield f"{mutation.file}: the text of {mutation.what!r} is there {num_found} times, not once: {mutation.old!r}"
        if mutation.old == mutation.new:
            yield f"{mutation.file}: {mutation.what!r} changes nothing"
        test_file, _, rest = mutation.test.partition("::")
        name = re.match(r"\w*", rest)
        text = (root / test_file).read_text() if (root / test_file).is_file() else ""
        if name is None or not re.search(rf"^(async )?def {name[0]}\(", text, re.MULTILINE):
            yield f"{mutation.what!r}: there is no test {mutation.test}"
    names = [(mutation.promise, mutation.what) for mutation in mutations]
    yield from (f"two mutations have one name: {name}" for name in dict.fromkeys(names) if names.count(name) > 1)
