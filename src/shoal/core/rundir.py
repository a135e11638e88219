"""The names inside a run directory. Who writes each file is elsewhere; that all of them agree on its name is here."""

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shoal.core.errors import RequestError

Readers = Literal["owner", "group", "all"]
"""Who may read a run directory and everything in it."""
# "all" is as far as the user's own mask goes.
_WITHHELD: dict[str, int] = {"owner": 0o077, "group": 0o027, "all": 0o000}


@dataclass(frozen=True)
class RunDir:
    """A run directory, by its path."""

    root: Path

    @property
    def recipe(self) -> Path:
        """The recipe as resolved, every default filled in."""
        return self.root / "recipe.toml"

    @property
    def plan(self) -> Path:
        """The plan that ran."""
        return self.root / "plan.json"

    @property
    def summary(self) -> Path:
        """How the run ended, with its numbers."""
        return self.root / "summary.json"

    @property
    def forecast(self) -> Path:
        """What was predicted of the run before it started, where that was asked for."""
        return self.root / "forecast.json"

    @property
    def live(self) -> Path:
        """Where every rank is now, rewritten each second while the run goes on."""
        return self.root / "live.json"

    @property
    def lock(self) -> Path:
        """Held, by ``flock``, by the process that runs here; its text is that process's id."""
        return self.root / "run.lock"

    @property
    def identity(self) -> Path:
        """The name of the run that no other run has; see ``identify``."""
        return self.root / "run.id"

    @property
    def checkpoints(self) -> Path:
        """One folder per kept checkpoint."""
        return self.root / "checkpoints"

    @property
    def published(self) -> Path:
        """Models that were published while the run trained, and the pointer to the newest."""
        return self.root / "published"

    @property
    def traces(self) -> Path:
        """Profiles of chosen steps."""
        return self.root / "traces"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard files."""
        return self.root / "tensorboard"

    @property
    def errors(self) -> Path:
        """What each failed rank said of its own failure."""
        return self.root / "errors"

    @property
    def supervisor_events(self) -> Path:
        """The events of the process that started the ranks, in the same form as theirs."""
        return self.root / "events" / "supervisor.jsonl"

    def events(self, rank: int) -> Path:
        """The events of one rank, one JSON object per line."""
        return self.root / "events" / f"rank-{rank:03d}.jsonl"

    def log(self, rank: int) -> Path:
        """What one rank printed."""
        return self.root / "logs" / f"rank-{rank:03d}.log"

    def error(self, rank: int) -> Path:
        """What one rank said of its own failure."""
        return self.errors / f"rank-{rank:03d}.json"

    @property
    def is_empty(self) -> bool:
        """True when nothing has ever run here."""
        return not self.recipe.exists() and not self.checkpoints.exists()


def make_run_dir(path: Path, readers: Readers = "owner") -> None:
    """Make a run directory where there is none; one that is there keeps its rights.

    Raises:
        OSError: it cannot be made.
    """
    path.mkdir(mode=0o777 & ~_WITHHELD[readers], parents=True, exist_ok=True)


def identify(path: Path) -> str:
    """The name of the run in a directory, 16 hexadecimal digits, drawn by whoever asks first.

    Processes on several machines know their run by it: an address may belong to another run by now.

    Raises:
        RequestError: the file holds something else.
        OSError: it can be neither read nor made.
    """
    file = RunDir(path).identity
    beside = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    if not file.exists():
        beside.write_text(secrets.token_hex(8) + "\n")
        try:
            # Not a rename: of two that come at the same time the first one counts, and whoever reads finds a whole name.
            os.link(beside, file)
        except FileExistsError:
            pass
        finally:
            beside.unlink()
    found = file.read_text(errors="replace").strip()
    if not re.fullmatch("[0-9a-f]{16}", found):
        raise RequestError(f"{file} should hold 16 hexadecimal digits and holds {found[:40]!r}; remove it")
    return found


def withhold(readers: Readers) -> int:
    """Let this process, and what it starts from now on, make files and folders for these readers alone; the mask before."""
    before = os.umask(0o077)
    os.umask(before | _WITHHELD[readers])
    return before


@contextmanager
def withheld(readers: Readers) -> Iterator[None]:
    """``withhold`` until the block ends."""
    before = withhold(readers)
    try:
        yield
    finally:
        os.umask(before)


def replace_text(path: Path, text: str) -> None:
    """Write a text to a file in one piece: a reader, also after a kill of this process, finds the old text or the new one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text)
    os.replace(beside, path)


def lies_in_run(filename: object) -> bool:
    """True when a file that could not be opened is part of a run directory, as far as can be seen from outside."""
    if not isinstance(filename, str | os.PathLike):
        return False
    path = Path(os.fspath(filename))
    run = RunDir(path.parent)
    # A folder that is closed to us shows no recipe; what was wanted in it has a name that a run gives.
    folders = (run.checkpoints, run.errors, run.traces, run.tensorboard, run.events(0).parent, run.log(0).parent)
    if path in (run.recipe, run.plan, run.summary, run.forecast, run.live, run.lock, *folders):
        return True
    return any(RunDir(folder).recipe.is_file() for folder in (path, *path.parents[:4]) if os.access(folder, os.X_OK))
