"""The help of the recipe, printed from the recipe itself: every key, its default and its docstring.

The text is TOML: saved to a file it sets every default. What has no default, a table that is not there unless it is written, and
the other choices of a section are comments in it.
"""

import json
import types
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, Tag
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from shoal.trainer.config import Recipe

_REQUIRED = "(required)"
_UNSET = "(unset)"


def describe_recipe() -> str:
    """Every section and key of a recipe, as TOML with comments."""
    lines = list(_describe_fields(Recipe))
    for name, field in Recipe.model_fields.items():
        for place, (choice, section) in enumerate(_sections(field)):
            title = f"[{name}]" if choice is None else f"[{name}]  # {choice}"
            described = [title, *_describe_fields(section)]
            lines += ["", *(described if place == 0 else _commented(described)), *_describe_tables(name, section)]
    return "\n".join(lines)


def _commented(lines: Iterable[str]) -> list[str]:
    return [line if not line or line.startswith("#") else f"# {line}" for line in lines]


def _describe_tables(path: str, section: type[BaseModel]) -> Iterator[str]:
    """The tables inside a section, each under its whole name and with what it is for."""
    for name, field in section.model_fields.items():
        for suffix, table in _tables(field):
            inner = f"{path}.{name}{suffix}"
            yield from ("", *_commented([f"[{inner}]  # {_help_text(field)}", *_describe_fields(table)]))
            yield from _describe_tables(inner, table)


def _describe_fields(section: type[BaseModel]) -> Iterator[str]:
    for name, field in section.model_fields.items():
        if _sections(field) or _tables(field):
            continue
        default = _default_text(field)
        line = f"{name} = {default}    # {_type_text(field.annotation)}: {_help_text(field)}"
        yield f"# {line}" if default in (_REQUIRED, _UNSET) else line


def _sections(field: FieldInfo) -> list[tuple[str | None, type[BaseModel]]]:
    """The sections that a field of the recipe can hold, each with the choice that selects it."""
    annotation = field.annotation
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [(None, annotation)]
    found: list[tuple[str | None, type[BaseModel]]] = []
    for option in get_args(annotation):
        if get_origin(option) is Annotated:
            member, *marks = get_args(option)
            found += [(mark.tag, member) for mark in marks if isinstance(mark, Tag)]
    return found


def _tables(field: FieldInfo) -> list[tuple[str, type[BaseModel]]]:
    """The tables that a field of a section can hold, each with the end of its name: in a table of tables the user chooses it."""
    annotation = field.annotation
    suffix = ""
    if get_origin(annotation) is dict:
        annotation, suffix = get_args(annotation)[1], ".NAME"
    options = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    return [(suffix, option) for option in options if isinstance(option, type) and issubclass(option, BaseModel)]


def _help_text(field: FieldInfo) -> str:
    """The docstring of a field on one line."""
    return " ".join((field.description or "").split())


def _default_text(field: FieldInfo) -> str:
    default: Any = field.get_default(call_default_factory=True, validated_data={})
    if default is PydanticUndefined:
        return _REQUIRED
    if default is None:
        return _UNSET
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, str):
        return json.dumps(default)
    if isinstance(default, tuple):
        return json.dumps(list(default))
    return str(default)


def _type_text(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _type_text(get_args(annotation)[0])
    if origin is Literal:
        return " | ".join(f'"{choice}"' for choice in get_args(annotation))
    if origin in (Union, types.UnionType):
        return " | ".join(_type_text(option) for option in get_args(annotation) if option is not type(None))
    if origin in (tuple, list):
        return f"list of {_type_text(get_args(annotation)[0])}"
    if origin is dict:
        return f"table of {_type_text(get_args(annotation)[1])}"
    if origin is not None:
        return str(annotation).replace("typing.", "")
    return str(getattr(annotation, "__name__", annotation))
