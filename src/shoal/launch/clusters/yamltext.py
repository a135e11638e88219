"""Values as YAML, in the part of it that manifests need. A library for this would be the only dependency of writing one. Pure."""

import json
import re
from collections.abc import Mapping
from typing import Any

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9/_.-]*")
_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})
"""What would be read as another kind of value."""


def write_yaml(value: Any, indent: int = 0) -> str:
    """Mappings, lists, texts, numbers and truth values as a block; a text of several lines stays readable."""
    space = "  " * indent
    if isinstance(value, Mapping):
        return "".join(f"{space}{_scalar(key)}:{_after(item, indent)}" for key, item in value.items())
    return "".join(f"{space}-{_item(one, indent)}" for one in value)


def _after(value: Any, indent: int) -> str:
    if isinstance(value, Mapping | list | tuple) and value:
        return f"\n{write_yaml(value, indent + 1)}"
    if isinstance(value, str) and "\n" in value and _can_be_block(value):
        space = "  " * (indent + 1)
        chomp = "" if value.endswith("\n") else "-"
        return f" |2{chomp}\n" + "".join(f"{space}{line}\n" if line else "\n" for line in value.splitlines())
    return f" {_scalar(value)}\n"


def _item(value: Any, indent: int) -> str:
    if isinstance(value, Mapping) and value:
        # The first key stands behind the dash.
        return " " + write_yaml(value, indent + 1)[2 * (indent + 1) :]
    return _after(value, indent)


def _can_be_block(text: str) -> bool:
    """A block keeps a text as it is only where nothing in it is invisible."""
    kept = text.rstrip("\n")
    is_plain = all(letter == "\n" or letter.isprintable() for letter in text)
    return (
        is_plain
        and kept != ""
        and len(text) - len(kept) <= 1
        and text == "\n".join(text.splitlines()) + "\n" * (text != kept)
    )


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    if isinstance(value, Mapping):
        return "{}"
    # What JSON writes is YAML too.
    return json.dumps(value, ensure_ascii=False)
