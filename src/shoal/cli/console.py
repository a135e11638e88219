"""What all verbs share: options, lines for people on stderr, the result as a JSON file for programs, and tables.

Every verb takes ``--json FILE``. The file appears whole or not at all, because a program that waits for it must never read half
of it.
"""

import contextlib
import dataclasses
import json
import math
import os
import shutil
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from shoal.core.errors import EXIT_SIGTERM, RequestError, RunError

JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write the result there as JSON, for programs; - is stdout, alone."),
]
"""The ``--json`` option as every verb declares it."""
RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe, a TOML file.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one setting; KEY= unsets it.")
]
ClusterName = Annotated[
    str,
    typer.Option(
        "--cluster",
        metavar="NAME:NODESxDEVICES[@LINK]|FILE",
        help="Where, such as a100-80gb:16x8, or a100-80gb:16x8@ethernet-100g.",
    ),
]
STDOUT = Path("-")
"""As ``--json``: the result goes to stdout, and everything that is written for people to stderr (``cli/main.py``)."""


def log(line: str) -> None:
    """Print a line for people, at once, where it is not taken for a result."""
    print(line, file=sys.stderr, flush=True)


def unwind_on_sigterm() -> None:
    """Let SIGTERM end a verb by unwinding, which ends its processes and removes their files; the default action would not."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(EXIT_SIGTERM))


def check_result_file(path: Path | None, option: str = "--json") -> None:
    """Refuse a result file that could not be written, before the work that it is to report.

    Raises:
        RequestError: its folder is missing or closed to us, or the path is a folder.
    """
    if path is None or path == STDOUT:
        return
    if path.is_dir():
        raise RequestError(f"{option} {path} is a folder; name a file")
    if not path.parent.is_dir():
        raise RequestError(f"{option} {path}: there is no folder {path.parent}; make it first")
    target = path if _keeps_its_place(path) else path.parent
    if not os.access(target, os.W_OK):
        raise RequestError(f"{option} {path}: {target} is not writable")


def check_folder(path: Path | None, option: str) -> None:
    """Refuse a folder that could not be made or written to, before the work that fills it.

    Raises:
        RequestError: it is a file, closed to us, or cannot be made where it is to be.
    """
    if path is None:
        return
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    there = missing[-1].parent if missing else path
    if not there.is_dir():
        raise RequestError(f"{option} {path}: {there} is a file; name a folder")
    if not os.access(there, os.W_OK):
        raise RequestError(f"{option} {path}: {there} is not writable; name another folder")
    if missing:
        # Tried, because permission is not all: nobody makes a folder in /proc.
        try:
            missing[-1].mkdir()
            missing[-1].rmdir()
        except OSError as error:
            raise RequestError(f"{option} {path} cannot be made: {error.strerror}; name another folder") from error


def to_json(result: Any) -> str:
    """A result as JSON text that ends its last line.

    Dataclasses become objects, paths become text, and a number that JSON does not have (NaN, infinity) becomes null.
    """
    return json.dumps(_plain(result), indent=2, allow_nan=False) + "\n"


def write_result(path: Path | None, result: Any) -> None:
    """Write ``result`` as JSON: beside, then renamed; straight into it where ``path`` is a pipe, a terminal or a link.

    Raises:
        RunError: the disk refused.
    """
    if path is None:
        return
    text = to_json(result)
    if path == STDOUT:
        assert sys.__stdout__ is not None
        sys.__stdout__.write(text)
        return
    write_whole(path, text)


def write_whole(path: Path, text: str, option: str = "--json") -> None:
    """Write a text file whole or not at all, its line ends as they are; a pipe or a link stays in its place.

    Raises:
        RunError: the disk refused.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if _keeps_its_place(path):
            path.write_text(text, encoding="utf-8", newline="")
            return
        with contextlib.suppress(FileNotFoundError):
            beside.unlink()
        beside.write_text(text, encoding="utf-8", newline="")
        if path.exists():
            shutil.copymode(path, beside)
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise RunError(f"cannot write {option} {path}: {error}") from error


def is_rewritable(path: Path) -> bool:
    """True when a result can be written there again and again, each in place of the one before."""
    return path != STDOUT and not _keeps_its_place(path)


def _keeps_its_place(path: Path) -> bool:
    """True for what a rename must not replace; /dev/stdout is a link, and to a file where stdout goes to one."""
    return path.exists() and (path.is_symlink() or not path.is_file())


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None) -> None:
    """Print a table on stdout: as wide as the terminal, or one line per row where stdout is not a terminal."""
    # rich takes 0.1 s to import: --help must not pay for tables.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    is_terminal = sys.stdout.isatty()
    # rich would keep bold letters where only colours are refused.
    styled: Literal["auto"] | None = "auto" if has_colour() else None
    Console(file=sys.stdout, width=None if is_terminal else 10_000, color_system=styled).print(table)


def has_colour() -> bool:
    """True when stdout is a terminal that understands escape codes, and nobody asked for none (no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") not in (None, "", "dumb")


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def say_seconds(seconds: float) -> str:
    """``0.0123`` -> ``12.3 ms``."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.4g} s"
