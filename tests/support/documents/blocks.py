"""The fenced code blocks of a Markdown page, with what the comment above each one says of it.

A block has a language: ``python``, ``sh``, ``console`` (commands after ``$`` and what they print), ``toml``, ``json``, or
``text`` for what is no code. A first line ``# name.py`` or ``# name.toml`` makes it a file that later blocks can use. Above a
block may stand::

    <!-- not run: why -->     it cannot run here: it needs a cluster, a device, a network
    <!-- soak: why -->        it takes long, and `make soak` runs it
    <!-- exit: 2 -->          its last command ends with this code
    <!-- exact -->            what it prints is compared with its numbers, which are otherwise left out
"""

import re
from dataclasses import dataclass
from pathlib import Path

LANGUAGES = {"python", "sh", "console", "toml", "json", "text"}
_BLOCK = re.compile(
    r"(?P<notes>(?:^ *<!--[^\n]*-->[ ]*\n\n?)*)^(?P<indent> *)```(?P<language>[^\n]*)\n(?P<text>.*?)^ *```[ ]*$",
    re.M | re.S,
)
_NOTE = re.compile(r"<!-- *(not run|soak|exit|exact) *:? *(.*?) *-->")
_FILE = re.compile(r"# ([\w./-]+\.(?:py|toml|csv))\b")


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    line: int
    language: str
    text: str
    notes: dict[str, str]

    @property
    def file(self) -> str | None:
        """The name of the file that this block is, if its first line says so."""
        found = _FILE.match(self.text)
        return found[1] if found else None

    @property
    def is_run(self) -> bool:
        return self.language != "text" and "not run" not in self.notes

    @property
    def is_long(self) -> bool:
        return "soak" in self.notes


def read_blocks(page: Path) -> list[Block]:
    """All blocks of a page, in order."""
    text = page.read_text()
    found = []
    for match in _BLOCK.finditer(text):
        indent = len(match["indent"])
        lines = [line[indent:] if not line[:indent].strip() else line for line in match["text"].splitlines()]
        number = text.count("\n", 0, match.start("language")) + 1
        notes = dict(_NOTE.findall(match["notes"]))
        found.append(Block(number, match["language"].strip(), "\n".join(lines) + "\n", notes))
    return found


@dataclass(frozen=True)
class Command:
    """A command of a block, and the lines that the page says it prints."""

    text: str
    shown: tuple[str, ...] = ()


def read_commands(block: Block) -> list[Command]:
    """The commands of an ``sh`` block, which is one, or of a ``console`` block, each after ``$``."""
    if block.language == "sh":
        return [Command(block.text)]
    found: list[tuple[str, list[str]]] = []
    goes_on = False
    for line in block.text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif goes_on:
            found[-1] = (found[-1][0] + "\n" + line, [])
        else:
            assert found, f"line {block.line}: a console block begins with $ and a command"
            found[-1][1].append(line)
            continue
        goes_on = found[-1][0].endswith("\\")
    return [Command(text, tuple(shown)) for text, shown in found]


_UNITS = r"(?: ?(?:k|M|B|us|ms|s|m|min|h|days?|B|KiB|MiB|GiB|TiB)\b)?"
_HASH = re.compile(r"(?<!\.)\b[0-9a-f]{8,64}\b")
_NUMBER = re.compile(rf"[-+]?\b\d[\d.,]*(?:e[-+]?\d+)?{_UNITS}")


def skeleton(line: str, *, exact: bool) -> str:
    """A line without the width of its columns and, unless ``exact``, without numbers, units and hashes."""
    if not exact:
        line = _NUMBER.sub("#", _HASH.sub("#", line))
    return " ".join(line.split())


def missing_lines(shown: tuple[str, ...], printed: str, *, exact: bool) -> list[str]:
    """The lines that a page shows and that were not printed in this order.

    ``...`` stands for any text inside a line, and for any number of lines where it is one: other lines may be left out too.
    """
    lines = iter([skeleton(line, exact=exact) for line in printed.splitlines()])
    missing = []
    for line in shown:
        if line.strip() in ("", "..."):
            continue
        pattern = re.compile(".*".join(map(re.escape, skeleton(line, exact=exact).split("..."))))
        if not any(pattern.fullmatch(found) for found in lines):
            missing.append(line)
    return missing
