"""An exit that the command did not ask for is an error; ``os._exit`` is in ``tests/bugs/test_left_without_a_word.py``."""

import os
import sys
from types import FunctionType

import pytest

from shoal.cli.leaving import only_when_done
from shoal.core.errors import RunError


def leave() -> None:
    sys.exit(0)


def leave_in(module: str) -> None:
    FunctionType(leave.__code__, {"__name__": module, "sys": sys})()


def test_what_the_command_runs_cannot_end_it_with_success() -> None:
    before = os._exit
    with (
        pytest.raises(RunError, match=r"test_leaving\.py:\d+ called sys\.exit\(0\) before the command was done"),
        only_when_done(),
    ):
        leave_in("mine.model")
    assert os._exit is before


@pytest.mark.parametrize("module", ["shoal.cli.verify", "typer.core", "click.core"])
def test_the_command_line_ends_as_it_likes(module: str) -> None:
    with pytest.raises(SystemExit), only_when_done():
        leave_in(module)


def test_a_fork_ends_as_it_likes() -> None:
    with only_when_done():
        child = os.fork()
        if child == 0:
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
