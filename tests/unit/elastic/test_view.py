"""Chains of replicas, as tables: ``p+b~j`` is primary p, backup b, and j joining under order 9."""

import pytest

from shoal.elastic.view import Chain, Joining, admit, drop, even_out, fill, lay_out, remove


def chains(text: str) -> tuple[Chain, ...]:
    made = []
    for one in text.split():
        synced, *joining = one.split("~")
        primary, *backups = synced.split("+")
        made.append(
            Chain(
                primary=primary,
                backups=tuple(backups),
                joining=tuple(Joining(server=name[0], order=int(name[1:] or 9)) for name in joining),
            )
        )
    return tuple(made)


@pytest.mark.parametrize(
    ("servers", "shards", "backups", "expected"),
    [
        ("abc", 3, 1, "a+b b+c c+a"),
        ("abc", 3, 2, "a+b+c b+c+a c+a+b"),
        ("abc", 3, 0, "a b c"),
        ("ab", 2, 3, "a+b b+a"),
        ("a", 1, 1, "a"),
        ("ab", 4, 1, "a+b b+a a+b b+a"),
        ("abcd", 2, 1, "a+b b+c"),
    ],
)
def test_lay_out(servers: str, shards: int, backups: int, expected: str) -> None:
    assert lay_out(servers, shards=shards, backups=backups) == chains(expected)


@pytest.mark.parametrize(
    ("before", "living", "after", "lost"),
    [
        ("a+b b+c c+a", "abc", "a+b b+c c+a", ()),
        ("a+b b+c c+a", "bc", "b b+c c", ()),
        ("a+b b+c c+a", "c", "a+b c c", (0,)),
        ("a+b b+c c+a", "", "a+b b+c c+a", (0, 1, 2)),
        ("a+b~c b~c", "ac", "a~c b~c", (1,)),
        # What joins is ordered again when the primary changes, and not when it stays.
        ("a+b~c b+a~c", "bc", "b~c7 b~c", ()),
        # The backup that leads the fewest shards is promoted.
        ("a+b+c b", "bc", "c+b b", ()),
        ("a+b+c c", "bc", "b+c c", ()),
    ],
)
def test_drop(before: str, living: str, after: str, lost: tuple[int, ...]) -> None:
    assert drop(chains(before), living=living, epoch=7) == (chains(after), lost)


@pytest.mark.parametrize(
    ("before", "servers", "after"),
    [
        ("a+b b+a", "ab", "a+b b+a"),
        ("b b", "b", "b b"),
        ("b b", "bc", "b~c7 b~c7"),
        ("b b+a", "abc", "b~c7 b+a"),
        ("b~c b~c", "bc", "b~c b~c"),
        ("b c c+b", "bcd", "b~d7 c~d7 c+b"),
    ],
)
def test_fill(before: str, servers: str, after: str) -> None:
    assert fill(chains(before), servers=servers, backups=1, epoch=7) == chains(after)


def test_fill_tries_no_unfit_server() -> None:
    assert fill(chains("a b"), servers="abc", backups=1, epoch=7, unfit={(0, "c")}) == chains("a~b7 b~c7")
    assert fill(chains("a"), servers="ab", backups=1, epoch=7, unfit={(0, "b")}) == chains("a")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a+b b+a", "a+b b+a"),
        ("b+a b+a", "b+a a+b"),
        ("b+a b", "b+a b"),
        ("b b", "b b"),
        ("b+a~c b+c", "b+a~c c+b"),
        ("b+c b+c b+c b+c", "b+c c+b c+b b+c"),
    ],
)
def test_even_out(before: str, after: str) -> None:
    assert even_out(chains(before)) == chains(after)


def test_admit_and_remove() -> None:
    (chain,) = chains("a+b~c~d")
    assert (admit(chain, "c"),) == chains("a+b+c~d")
    assert (remove(chain, "b"),) == chains("a~c~d")
    assert (remove(chain, "d"),) == chains("a+b~c")
    assert chain.synced == ("a", "b") and chain.replicas == ("a", "b", "c", "d")
