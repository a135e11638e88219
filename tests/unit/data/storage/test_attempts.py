"""How often and how long a request is made again."""

import pytest

from shoal.data.storage.attempts import Attempts, Part, Transient
from shoal.data.storage.config import StorageConfig
from shoal.data.storage.protocol import Truncated, Unreachable


def _attempts(**settings: float) -> Attempts:
    return Attempts("test://x", StorageConfig(**{"backoff": 0.0, "retries": 2, **settings}))  # type: ignore[arg-type]


def test_a_failure_is_counted_and_the_request_made_again() -> None:
    attempts, left = _attempts(), [Transient("a"), Transient("b")]

    def act() -> int:
        if left:
            raise left.pop()
        return 7

    assert attempts.run("asking", "p", act) == 7
    assert (attempts.calls.requests, attempts.calls.retries) == (3, 2)


def test_the_last_failure_is_told() -> None:
    def act() -> int:
        raise Transient("the server answered 503")

    with pytest.raises(
        Unreachable, match=r"test://x/p: asking failed for .* 3 times in a row, at last with: the server answered 503"
    ):
        _attempts().run("asking", "p", act)
    with pytest.raises(Unreachable, match="1 times in a row"):
        _attempts(deadline=1e-9).run("asking", "p", act)


def test_a_read_asks_for_what_is_missing_only() -> None:
    asked = []

    def ask(start: int, end: int | None) -> Part:
        asked.append((start, end))

        def chunks():  # type: ignore[no-untyped-def]
            yield b"0123456789"[start : start + 3]
            raise Transient("broke off")

        return Part(size=10, version="v", chunks=chunks())

    assert _attempts().read("p", 1, 9, ask) == b"12345678"
    assert asked == [(1, 9), (4, 9), (7, 9)]


def test_an_answer_that_is_longer_than_asked_is_cut() -> None:
    part = Part(size=10, version="", chunks=iter([b"0123456789"]))
    assert _attempts().read("p", 0, 4, lambda start, end: part) == b"0123"


def test_a_file_that_is_too_short_is_not_asked_again() -> None:
    asked = []

    def ask(start: int, end: int | None) -> Part:
        asked.append(start)
        return Part(size=3, version="", chunks=iter([b"012"]))

    with pytest.raises(Truncated, match="ends at byte 3, and bytes up to 4"):
        _attempts().read("p", 0, 4, ask)
    assert asked == [0]
