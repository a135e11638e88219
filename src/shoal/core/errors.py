"""The errors people see, and the exit codes they become.

Two kinds only, because a user can do two things about an error: change the request, or look at what happened. Both carry one
message that names the numbers and the fix; the command line prints that message and nothing else unless ``--debug`` is given.
"""

import difflib
from collections.abc import Iterable

EXIT_DONE = 0
EXIT_NO = 1
EXIT_WRONG_REQUEST = 2
EXIT_SIGINT = 130
EXIT_SIGTERM = 143


class ShoalError(Exception):
    """Anything Shoal raises on purpose."""

    exit_code = EXIT_NO


class RequestError(ShoalError):
    """The request was wrong: a misspelt key, an impossible plan, a missing file. Raised before any process starts."""

    exit_code = EXIT_WRONG_REQUEST


class AgreedError(RequestError):
    """A wrong request that all ranks found together: every one of them raises the same, and one has to tell it."""


class RunError(ShoalError):
    """The request was fine and the run failed: a dead rank, a non-finite loss, a refused checkpoint."""


class FinalError(RunError):
    """The run failed, and starting it again would end the same: the same steps lead to the same loss that is not finite."""


class Refusal(RunError):
    """The request cannot be met, and only running it could show that: a module does what its plan does not allow. Has the fix."""


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """The choice closest to a misspelt ``name``, or None when nothing is close."""
    return next(iter(nearest_few(name, choices, most=1)), None)


def nearest_few(name: str, choices: Iterable[str], *, most: int = 3) -> list[str]:
    """The few choices that are close to a misspelt ``name``, the closest first."""
    # In a name of two or three letters one wrong letter is already half of it.
    cutoff = 0.5 if len(name) <= 3 else 0.6
    return difflib.get_close_matches(name, list(choices), n=most, cutoff=cutoff)


def offer(name: str, choices: Iterable[str]) -> str:
    """A question that offers the few names that are close, with a space after it; empty when none is."""
    *others, last = [repr(each) for each in nearest_few(name, choices)] or [""]
    if not last:
        return ""
    return f"did you mean {', '.join(others)} or {last}? " if others else f"did you mean {last}? "


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """A sentence that offers the nearest choice, or lists them all when none is near."""
    options = sorted(choices)
    close = nearest(name, options)
    if close is not None:
        return f"did you mean {close!r}?"
    return "the choices are " + ", ".join(options) if options else "there is nothing to choose from"
