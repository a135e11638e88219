"""Writes ``docs/api.md`` and ``src/shoal/__init__.pyi`` from what ``shoal/__init__.py`` exports and from its docstrings.

    python docs/make_api.py

The page holds, for every exported name, its signature and docstring, and those of its public methods, properties and fields. A
test holds both files against what this would write.
"""

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import shoal

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "api.md"
STUB = ROOT / "src" / "shoal" / "__init__.pyi"
_HEAD = """# The names of `import shoal`

This page is written by `python docs/make_api.py` from the docstrings. What may change in which version:
[stability.md](stability.md). `import shoal` itself is quick and imports no torch: each name is imported when it is first used.
"""
_STUB_HEAD = '"""The types of what the package exports; written by docs/make_api.py."""\n'


def make_stub() -> str:
    """The types of the exports: type checkers cannot follow names that are imported when they are first used."""
    lines = [
        f"from {home} import {name} as {name}"
        for name, home in sorted(shoal._HOMES.items(), key=lambda pair: pair[::-1])
    ]
    listed = "".join(f'    "{name}",\n' for name in sorted(shoal._HOMES))
    return f"{_STUB_HEAD}\n{chr(10).join(lines)}\n\n__all__ = [\n{listed}]\n"


def make_page() -> str:
    """The page: an index by subject, then every name."""
    parts = [_HEAD]
    for subject, names in shoal._SUBJECTS.items():
        parts.append(f"- **{subject}**: " + ", ".join(f"[`{name}`](#{_anchor(name)})" for name in names))
    for subject, names in shoal._SUBJECTS.items():
        parts.append(f"\n## {subject}")
        for name, home in names.items():
            parts.append(_describe(name, getattr(importlib.import_module(home), name), home))
    return "\n".join(parts).rstrip() + "\n"


def _anchor(name: str) -> str:
    """As GitHub makes it of a heading: without case, so that the second of two that are then alike has a number."""
    alike = [other for names in shoal._SUBJECTS.values() for other in names if other.lower() == name.lower()]
    number = alike.index(name)
    return f"shoal{name.lower()}" + (f"-{number}" if number else "")


def _describe(name: str, thing: Any, home: str) -> str:
    lines = [f"\n### shoal.{name}\n"]
    if inspect.isclass(thing):
        kind = "error" if issubclass(thing, BaseException) else "class"
        bases = [base.__name__ for base in thing.__bases__ if base.__module__.startswith("shoal.") or kind == "error"]
        lines.append(
            f"*{kind} of `{home}`" + (f", a {', '.join(f'`{base}`' for base in bases)}*\n" if bases else "*\n")
        )
        lines.append(_text(thing))
        lines += list(_members(thing))
    else:
        lines.append(f"```python\n{_signature(name, thing)}\n```\n")
        lines.append(_text(thing))
    return "\n".join(lines).rstrip()


def _members(thing: type) -> Iterator[str]:
    """Fields with their docstrings, then properties and methods, of this class and of those of ours that it is made of."""
    fields = dict(_fields(thing))
    if fields:
        yield "\n| field | default | |\n|---|---|---|"
        yield from (f"| `{name}` | {default} | {_cell(text)} |" for name, (default, text) in fields.items())
        yield ""
    if "__init__" in vars(thing) and not fields:
        yield f"\n```python\n{_signature(thing.__name__, thing.__init__)}\n```\n"
        if thing.__init__.__doc__:
            yield _text(thing.__init__)
    for name, member in _public(thing):
        if isinstance(member, property):
            yield f"\n**`.{name}`** {_text(member)}"
            continue
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        prefix = f"{thing.__name__}." if isinstance(member, classmethod | staticmethod) else "."
        yield f"\n**`{prefix}{_line(name, function)}`**\n\n{_text(function)}"


def _public(thing: type) -> Iterator[tuple[str, Any]]:
    own = [base for base in thing.__mro__ if base.__module__.startswith("shoal.")]
    seen: set[str] = set()
    for base in own:
        for name, member in vars(base).items():
            is_member = isinstance(member, property | classmethod | staticmethod) or inspect.isfunction(member)
            if is_member and not name.startswith("_") and name not in seen and not name.startswith("model_"):
                seen.add(name)
                yield name, member


def _fields(thing: type) -> Iterator[tuple[str, tuple[str, str]]]:
    """Names, defaults and docstrings of the annotated fields of a class, in the order of its source."""
    for base in reversed([base for base in thing.__mro__ if base.__module__.startswith("shoal.")]):
        try:
            body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        except OSError:
            continue
        assert isinstance(body, ast.ClassDef)
        for place, node in enumerate(body.body):
            if (
                isinstance(node, ast.AnnAssign)
                and isinstance(node.target, ast.Name)
                and not node.target.id.startswith("_")
            ):
                following = body.body[place + 1] if place + 1 < len(body.body) else None
                is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
                text = inspect.cleandoc(following.value.value) if is_text else ""
                yield node.target.id, (_default(node.value), text)


def _default(node: ast.expr | None) -> str:
    if node is None:
        return ""
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("Field", "field"):
        found = {keyword.arg: keyword.value for keyword in node.keywords}
        return f"`{ast.unparse(found['default'])}`" if "default" in found else ""
    return f"`{ast.unparse(node)}`".replace("|", "\\|")


def _signature(name: str, function: Any) -> str:
    """On one line where it fits, else an argument a line."""
    line = _line(name, function)
    if len(line) <= 100:
        return line
    signature = _plain_signature(function)
    parts, is_keyword = [], False
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not is_keyword:
            parts.append("    *,")
            is_keyword = True
        parts.append(f"    {parameter},")
    arrow = "" if signature.return_annotation is inspect.Signature.empty else f" -> {_annotation(signature)}"
    return _tidy("\n".join([f"{name}(", *parts, f"){arrow}"]))


def _line(name: str, function: Any) -> str:
    return _tidy(f"{name}{_plain_signature(function)}")


def _annotation(signature: inspect.Signature) -> str:
    return inspect.formatannotation(signature.return_annotation)


def _plain_signature(function: Any) -> inspect.Signature:
    signature = inspect.signature(function)
    parameters = [one for one in signature.parameters.values() if one.name not in ("self", "cls")]
    return signature.replace(parameters=parameters)


def _tidy(text: str) -> str:
    """Types by their own names, and no address of a default that is a function."""
    text = re.sub(r"<function .*? at 0x[0-9a-f]+>|<shoal[^>]* object at [^>]*>", "...", text)
    text = re.sub(r"\b(?:[a-z_0-9]+\.)+(?=[A-Z])", "", text)
    return text.replace("'", '"') if '"' not in text else text


def _text(thing: Any) -> str:
    """A docstring as Markdown: literals as code, sections in bold, indented code as code."""
    text = inspect.cleandoc(thing.__doc__ or "")
    text = re.sub(r"``([^`]+)``", r"`\1`", text)
    text = re.sub(r"^(Args|Returns|Raises|Yields):$", r"\n**\1**\n", text, flags=re.MULTILINE)
    lines = []
    section = False
    for line in text.splitlines():
        section = section or line.startswith("**")
        if section and (found := re.match(r"^    (\*{0,2}[\w.]+): (.*)$", line)):
            lines.append(f"- `{found[1]}`: {found[2]}")
        elif section and line.startswith("    "):
            lines.append(f"  {line.strip()}")
        else:
            lines.append(line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _cell(text: str) -> str:
    return re.sub(r"``([^`]+)``", r"`\1`", " ".join(text.split())).replace("|", "\\|")


def main() -> None:
    """Write both."""
    STUB.write_text(make_stub())
    PAGE.write_text(make_page())


if __name__ == "__main__":
    main()
