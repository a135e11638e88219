"""Options of ``shoal plan`` that are right or wrong by themselves, checked without torch: a wrong request is answered at once."""

from collections.abc import Sequence

from shoal.core.errors import RequestError, did_you_mean

ALLOWED = ("lossy",)
"""What ``--allow`` takes: plans whose replicas agree in other ways than by whole sums at every step."""


def check_options(*, top: int, allow: Sequence[str]) -> None:
    """Refuse options that no recipe makes right.

    Raises:
        RequestError: names the option, what it was given and what it takes.
    """
    if top < 1:
        raise RequestError(f"--top is {top}; give 1 or more")
    for word in allow:
        if word not in ALLOWED:
            raise RequestError(f"--allow {word!r} is unknown; {did_you_mean(word, ALLOWED)}")
