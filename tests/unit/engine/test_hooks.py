"""What may be given as a hook."""

import pytest

from shoal.core.errors import RequestError
from shoal.engine.hooks import Hook, Hooks, check_hooks
from shoal.trainer.loop import Trainer


class Own(Hook):
    pass


class Lookalike:
    def on_update(self, step, result):
        raise AssertionError("never called")


def test_hooks_are_taken_from_any_iterable_in_their_order():
    one, other = Own(), Hook()
    assert check_hooks(hook for hook in (one, other)) == (one, other)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([Hook(), Lookalike()], r"hooks\[1\] is .*derive the class Lookalike from shoal.Hook"),
        ([print], r"hooks\[0\] is .*print.*which is no hook"),
        ([Own], r"hooks\[0\] is the class Own itself; give one of it: Own\(\)"),
        (Own(), r"hooks= is one Own; give a list of hooks: \[\.\.\.\]"),
    ],
)
def test_what_is_no_hook_is_refused_before_anything_else(given, says):
    with pytest.raises(RequestError, match=says):
        Trainer(None, None, loss=None, train=None, hooks=given)


def test_what_is_added_later_is_looked_at_too():
    with pytest.raises(RequestError, match="which is no hook"):
        Hooks().add(Lookalike())
