"""Runs that a command names: opened, or refused with what is there instead."""

from pathlib import Path

from shoal.core.errors import RequestError, did_you_mean
from shoal.dashboard.runs.cache import ColumnCache, default_folder
from shoal.dashboard.runs.folder import RunFolder, is_run
from shoal.dashboard.runs.run import Run


def open_run(path: Path) -> Run:
    """The run of a run directory, read as far as it is.

    Raises:
        RequestError: there is none at this path.
    """
    check_run(path)
    return Run(path, cache=ColumnCache(default_folder())).look_once()


def check_run(path: Path) -> None:
    """Refuse what is no run directory.

    Raises:
        RequestError: it is none; says what there is.
    """
    if not path.exists():
        near = [one.name for one in _folders(path.parent) if is_run(one)]
        hint = f"; {did_you_mean(path.name, near)}" if near else ""
        raise RequestError(f"there is no {path}{hint}")
    if not path.is_dir():
        raise RequestError(f"{path} is a file; name a run directory, such as runs/first")
    if not is_run(path):
        inside = [one.name for one in _folders(path) if is_run(one)]
        raise RequestError(
            f"{path} has {len(inside)} run directories in it; name one, such as {path / inside[0]}"
            if inside
            else f"{path} is no run directory: it has neither a recipe.toml nor events"
        )


def open_folder(path: Path) -> RunFolder:
    """The runs of a folder, or the one run that it is, read as far as they are.

    Raises:
        RequestError: there is no such folder.
    """
    if not path.is_dir():
        what = "is a file" if path.exists() else "is not there"
        raise RequestError(f"{path} {what}; name a folder of run directories, such as runs")
    folder = RunFolder(path, ColumnCache(default_folder()))
    folder.look(all_runs=True)
    return folder


def _folders(path: Path) -> list[Path]:
    """Folders in a folder, as many as one would look through."""
    try:
        return sorted(one for one in path.iterdir() if one.is_dir())[:1000]
    except OSError:
        return []
