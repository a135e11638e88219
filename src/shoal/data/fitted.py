"""What was fitted on a run's data, kept in its folder as data: whoever continues or evaluates the run applies it and fits
nothing."""

from pathlib import Path

from shoal.data.config import AnyDataConfig, TableConfig
from shoal.data.prepare import prepare_rows
from shoal.data.rawrows import COLUMNS_NAME, save_columns
from shoal.data.transform.state import JSON_NAME

FOLDER = "data"
"""Of a run directory."""


def keep_fitted(data: AnyDataConfig, run_dir: Path) -> AnyDataConfig:
    """Save what the steps of ``data.prepare`` have learned into the run directory, unless it has that already.

    Returns:
        The section that says where it is, and which it is.

    Raises:
        RequestError: the data is no longer what the run was fitted on.
    """
    if not isinstance(data, TableConfig) or data.fitted is not None:
        return data
    folder = run_dir.absolute() / FOLDER
    kept = data.model_copy(update={"fitted": str(folder)})
    rows = prepare_rows(kept)
    if not (folder / JSON_NAME).is_file():
        rows.fitted.save(folder)
    if rows.targets and not (folder / COLUMNS_NAME).is_file():
        save_columns(rows, folder)
    return kept.model_copy(update={"fitted_digest": rows.fitted.digest})


def with_fitted(data: AnyDataConfig, run_dir: Path) -> AnyDataConfig:
    """The section of a run that may have been moved: its fitted steps are where the run is now."""
    folder = run_dir.absolute() / FOLDER
    if not isinstance(data, TableConfig) or not (folder / JSON_NAME).is_file():
        return data
    return data.model_copy(update={"fitted": str(folder)})
