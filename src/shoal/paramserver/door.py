"""Who is let in: a member's model is compared with the servers' by name, shape and type, before it can touch a weight; what its
recipe says with the center's, because two that differ in a seed or a rate have the same shapes; and its data with the servers',
because portions are named by numbers, which mean other samples in other data."""

from collections.abc import Mapping

Tensors = Mapping[str, tuple[tuple[int, ...], str]]
"""Shape and type of every trained parameter, by name."""


def find_difference(servers: Tensors, member: Tensors) -> str | None:
    """The first way in which a member's model is not the servers', both sides named; None when it is the same."""
    for name in sorted(servers.keys() ^ member.keys()):
        side, other = ("the servers", "this member") if name in servers else ("this member", "the servers")
        return f"{name!r} is trained by {side} and not by {other} ({len(servers)} and {len(member)} parameters)"
    for name, (shape, dtype) in sorted(servers.items()):
        theirs, their_dtype = member[name]
        if tuple(shape) != tuple(theirs) or dtype != their_dtype:
            return f"{name!r} is {list(shape)} {dtype} at the servers and {list(theirs)} {their_dtype} at this member"
    return None


def find_setting_difference(ours: Mapping[str, str], theirs: Mapping[str, str], *, here: str, there: str) -> str | None:
    """The settings in which two recipes differ, both sides named; None when there is none."""
    keys = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
    if not keys:
        return None
    shown = [
        f"{key} is {ours.get(key, 'not set')} at {here} and {theirs.get(key, 'not set')} at {there}" for key in keys[:3]
    ]
    return "; ".join(shown) + (f"; and {len(keys) - 3} more" if len(keys) > 3 else "")


def find_data_difference(servers: Mapping[str, str], member: Mapping[str, str], *, there: str) -> str | None:
    """In what a member's data is not the servers', both sides named; None when it is the same as far as both can say."""
    for key, value in servers.items():
        if member.get(key, value) != value:
            return f"{key} is {value} at the servers and {member[key]} at {there}"
    return None
