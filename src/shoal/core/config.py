"""How configuration is declared, read and refused.

Each room declares one frozen ``Config`` for its own section. A key that nobody declared is an error with the nearest name,
because a misspelt key that is silently ignored costs a training run. Field docstrings are the help text: there is no second
place to write it.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Discriminator, Tag, ValidationError

from shoal.core.errors import RequestError, did_you_mean, nearest

ConfigType = TypeVar("ConfigType", bound="Config")


class Config(BaseModel):
    """A frozen section of a recipe. Subclasses write a docstring under every field."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, strict=False
    )


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        RequestError: the file is missing, unreadable or not TOML.
    """
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise RequestError(f"no such file: {path}") from None
    except IsADirectoryError:
        raise RequestError(f"{path} is a folder; give the recipe file inside it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read {path}: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise RequestError(f"{path} is not valid TOML: {error}") from error


def apply_overrides(tables: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The tables with each ``section.key=value`` set; a value is TOML, or a bare word taken as a string.

    ``section.key=`` without a value takes the key out, so that its default holds again.

    Raises:
        RequestError: an override has no ``=``, goes through something that is not a section, or takes out what is not there.
    """
    result = _copy_tables(tables)
    for override in overrides:
        name, equals, text = override.partition("=")
        parts = [part.strip() for part in name.split(".")]
        if not equals or not all(parts):
            raise RequestError(f"--set {override!r} is not section.key=value, such as --set train.steps=100")
        table = result
        for part in parts[:-1]:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise RequestError(f"--set {override!r}: {part!r} is a value, not a section")
        if text.strip():
            table[parts[-1]] = _parse_value(text.strip())
        elif parts[-1] in table:
            del table[parts[-1]]
        else:
            raise RequestError(
                f"--set {override!r} takes out a key that the recipe does not set; {did_you_mean(parts[-1], table)}"
            )
    return result


def _copy_tables(tables: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy_tables(value) if isinstance(value, Mapping) else value for key, value in tables.items()}


def _parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def validate(
    config: type[ConfigType], tables: Mapping[str, Any], *, origin: str, overrides: Sequence[str] = ()
) -> ConfigType:
    """An instance of ``config`` from plain tables, with ``overrides`` applied to them.

    Raises:
        RequestError: says every wrong key with its path, what was found, what is allowed, and the nearest name; and whether it is
            the file, ``origin``, that is wrong or one of the overrides.
    """
    try:
        found = apply_overrides(tables, overrides)
        lines = dict(_too_long(found))
        if not lines:
            return config.model_validate(found)
    except ValidationError as error:
        lines = _explain_all(config, error)
    own = dict(_too_long(tables))
    try:
        config.model_validate(tables)
    except ValidationError as error:
        own |= _explain_all(config, error)
    blamed = [
        f"{origin if line in own else _blame_overrides(path, overrides) or origin}: {line}"
        for line, path in lines.items()
    ]
    raise RequestError("\n".join(blamed))


def _blame_overrides(path: str, overrides: Sequence[str]) -> str:
    """The overrides that set a key, one of its section's or a table around it, as they stand on the command line."""
    touching = []
    for override in overrides:
        key = ".".join(part.strip() for part in override.partition("=")[0].split("."))
        # A rule over the whole recipe has no path: any override may have broken it.
        if not path or f"{path}.".startswith(f"{key}.") or f"{key}.".startswith(f"{path}."):
            touching.append(f"--set {override}")
    return " ".join(touching)


def _too_long(tables: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Whole numbers of more than 64 bits, in words and with their paths: TOML has none, Python reads them, no size is one."""
    if isinstance(tables, Mapping):
        for key, value in tables.items():
            yield from _too_long(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tables, list):
        for value in tables:
            yield from _too_long(value, path)
    elif isinstance(tables, int) and not -(2**63) <= tables < 2**63:
        yield f"{path}: a whole number of {tables.bit_length()} bits, and the limit is 63 and a sign", path


def tagged(*members: type[Config], key: str) -> Any:
    """A section whose keys depend on one of them: ``[model] name = "gpt"`` allows other keys than ``name = "cnn"``.

    Each member declares ``key`` as a ``Literal`` (its tags), except that a member without it is chosen by ``build``.
    """

    def choose(value: Any) -> str | None:
        if isinstance(value, Mapping):
            return "build" if "build" in value else value.get(key)
        return "build" if hasattr(value, "build") else getattr(value, key, None)

    # pydantic names the function in its errors, and nothing else that would say which key it looked at.
    choose.__name__ = key
    options = [Annotated[member, Tag(tag)] for member in members for tag in _tags(member, key)]
    return Annotated[reduce(or_, options), Discriminator(choose)]


def _tags(member: type[BaseModel], key: str) -> tuple[str, ...]:
    field = member.model_fields.get(key)
    return ("build",) if field is None else tuple(str(tag) for tag in get_args(field.annotation))


def _explain_all(config: type[BaseModel], error: ValidationError) -> dict[str, str]:
    """Each problem in words, with the path of the key that it is about."""
    found = {}
    for problem in error.errors(include_url=False):
        keys, section = _walk(config, [str(part) for part in problem["loc"]])
        found[_explain(problem, keys, section)] = ".".join(keys)
    return found


def _explain(problem: Any, keys: Sequence[str], section: type[BaseModel] | None) -> str:
    path = ".".join(keys)
    if problem["type"] == "extra_forbidden":
        allowed = section.model_fields if section is not None else ()
        return f"unknown key {path!r}; {did_you_mean(keys[-1], allowed)}"
    if problem["type"] == "missing":
        return f"key {path!r} is missing"
    context = problem.get("ctx", {})
    if problem["type"] == "union_tag_invalid":
        expected = [tag.strip(" '") for tag in context["expected_tags"].split(",")]
        return f"{path}.{_tag_key(context)}: there is no {context['tag']!r}; {did_you_mean(context['tag'], expected)}"
    if problem["type"] == "union_tag_not_found":
        key, given = _tag_key(context), problem["input"]
        near = nearest(key, map(str, given)) if isinstance(given, Mapping) else None
        if near is not None:
            return f"unknown key {f'{path}.{near}'!r}; did you mean {key!r}?"
        return f"section {path!r} has neither {key!r}, which says which one it is, nor 'build'; see `shoal train --help-recipe`"
    if problem["type"] == "literal_error" and isinstance(problem["input"], str):
        choices = re.findall(r"'([^']*)'", context["expected"])
        return f"{path}: there is no {problem['input']!r}; {did_you_mean(problem['input'], choices)}"
    if problem["type"] in ("tuple_type", "list_type"):
        return f"{path}: {problem['input']!r} is no list; write one in brackets, such as [3, 1], or ['a', 'b'] of words"
    message = problem["msg"].removeprefix("Value error, ")
    found = "" if problem["type"] == "value_error" else f" (found {problem['input']!r})"
    return f"{path}: {message}{found}" if path else f"{message}{found}"


def _tag_key(context: Mapping[str, Any]) -> str:
    return str(context["discriminator"]).removesuffix("()")


def _walk(config: type[BaseModel], location: Sequence[str]) -> tuple[list[str], type[BaseModel] | None]:
    """The keys that the user wrote on the way to ``location``, and the section that holds the last of them.

    pydantic puts the tag of a tagged section into the location; it is not a key of the recipe, so it is left out here.
    """
    keys: list[str] = []
    section: type[BaseModel] | None = config
    parts = list(location)
    while parts:
        part = parts.pop(0)
        keys.append(part)
        if not parts or section is None:
            break
        field = section.model_fields.get(part)
        annotation = field.annotation if field is not None else None
        if get_origin(annotation) is dict:
            # A table of tables: the user chose the name of each.
            annotation = get_args(annotation)[1]
            keys.append(parts.pop(0))
            if not parts:
                break
        elif get_origin(annotation) is tuple and parts[0].isdigit():
            # A list of tables: the user gave each a place.
            annotation = get_args(annotation)[0]
            if get_origin(annotation) is Annotated:
                annotation = get_args(annotation)[0]
            keys.append(parts.pop(0))
            if not parts:
                break
        members = _members(annotation)
        if "" in members:
            section = members[""]
        elif members and parts[0] in members:
            section = members[parts.pop(0)]
        else:
            section = None
    return keys + parts if section is None else keys, section


def _members(annotation: Any) -> dict[str, type[BaseModel]]:
    """The sections that a field can hold, by tag; an untagged one has the tag ``""``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {"": annotation}
    found: dict[str, type[BaseModel]] = {}
    for option in get_args(annotation):
        if isinstance(option, type) and issubclass(option, BaseModel):
            found[""] = option
        if get_origin(option) is Annotated:
            member, *marks = get_args(option)
            found.update({mark.tag: member for mark in marks if isinstance(mark, Tag)})
    return found
