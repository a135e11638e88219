"""Fields of a JSON tree that nobody vouches for: each function gives the value or raises ``ValueError`` with what was found."""

from typing import Any

from shoal.checkpoint.layout import is_shard_name

MAX_NUMBER = 2**62
_MAX_DIMS = 32
_MAX_NAME = 1024


def check_object(what: str, tree: Any, *keys: str) -> None:
    """Refuse what is not an object with exactly these keys."""
    if not isinstance(tree, dict) or set(tree) != set(keys):
        raise ValueError(f"{what} is not an object with the keys {', '.join(keys)}")


def mapping(what: str, tree: Any) -> dict[str, Any]:
    """An object with any keys."""
    if not isinstance(tree, dict):
        raise ValueError(f"{what} is not an object")
    return tree


def text(what: str, value: Any) -> str:
    """A text of bounded length."""
    if not isinstance(value, str) or len(value) > _MAX_NAME:
        raise ValueError(f"{what} is not a text of up to {_MAX_NAME} characters")
    return value


def tensor_name(value: Any) -> str:
    """A name that a tensor can have, in a manifest and in a safetensors header."""
    name = text("a tensor's name", value)
    # A lone surrogate is valid in JSON and in Python, and in no file that others can read.
    if not name or name == "__metadata__" or not name.isprintable():
        raise ValueError(f"{name[:80]!r} cannot name a tensor")
    return name


def file_name(value: Any) -> str:
    """The plain name of a shard."""
    if not isinstance(value, str) or not is_shard_name(value):
        raise ValueError(f"{str(value)[:80]!r} is not a shard's name such as rank-000.safetensors")
    return value


def number(what: str, value: Any) -> int:
    """A whole number that a file can have: a size, a step, a dim."""
    # bool is an int in Python and never a count.
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_NUMBER:
        raise ValueError(f"{what} is {str(value)[:80]}, not a whole number of at least 0")
    return value


def shape_of(name: str, value: Any) -> tuple[int, ...]:
    """The dims of a tensor, or the place of a piece in one."""
    if not isinstance(value, list) or len(value) > _MAX_DIMS:
        raise ValueError(f"a shape of {name[:80]!r} is not a list of up to {_MAX_DIMS} numbers")
    return tuple(number(f"a dim of {name[:80]!r}", dim) for dim in value)
