"""What was fitted on a run's data, kept in its folder as data: whoever continues or evaluates the run applies it and fits
nothing."""

from pathlib import Path

from shoal.data.config import AnyDataConfig, StoreConfig, TableConfig
from shoal.data.prepare import ModelColumns, prepare_rows
from shoal.data.rawrows import COLUMNS_NAME, save_columns
from shoal.data.sources.preparedstore import is_prepared
from shoal.data.sources.storefile import open_store_data
from shoal.data.store.folder import open_folder
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
    if not isinstance(data, TableConfig | StoreConfig) or data.fitted is not None:
        return data
    folder = run_dir.absolute() / FOLDER
    kept = data.model_copy(update={"fitted": str(folder)})
    columns = _prepare(kept)
    if columns is None:
        return data
    if not (folder / JSON_NAME).is_file():
        columns.fitted.save(folder)
    if columns.targets and not (folder / COLUMNS_NAME).is_file():
        save_columns(columns, folder)
    return kept.model_copy(update={"fitted_digest": columns.fitted.digest})


def _prepare(data: TableConfig | StoreConfig) -> ModelColumns | None:
    """What becomes of the columns; None of a store whose rows are taken as they are."""
    if isinstance(data, TableConfig):
        return prepare_rows(data)
    if not is_prepared(data, open_folder(data.path, data.storage).manifest(data.version).schema):
        return None
    made = open_store_data(data).prepared
    return None if made is None else made.columns


def with_fitted(data: AnyDataConfig, run_dir: Path) -> AnyDataConfig:
    """The section of a run that may have been moved: its fitted steps are where the run is now."""
    folder = run_dir.absolute() / FOLDER
    if not isinstance(data, TableConfig | StoreConfig) or not (folder / JSON_NAME).is_file():
        return data
    return data.model_copy(update={"fitted": str(folder)})
