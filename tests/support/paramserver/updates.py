"""An update of a parameter server as its log would close it, for tests of what is made of it."""

from shoal.paramserver.records import Entry, PushId, Update


def make_update(number: int, *entries: tuple[str, int, float], dropped: tuple[PushId, ...] = ()) -> Update:
    """An update of these gradients: each the worker, its number and its weight."""
    return Update(
        number=number,
        entries=tuple(Entry(*entry) for entry in entries),
        loss=0.0,
        weight=1.0,
        samples=1,
        first_step=0,
        last_step=0,
        staleness=0,
        dropped=dropped,
    )
