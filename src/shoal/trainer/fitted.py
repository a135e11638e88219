"""What was fitted on a run's data, kept in its folder as data: whoever continues or evaluates the run applies it and fits nothing."""

from pathlib import Path

from shoal.data.config import TableConfig
from shoal.data.prepare import prepare_rows
from shoal.data.transform.state import JSON_NAME
from shoal.trainer.config import Recipe

_FOLDER = "data"


def keep_fitted(recipe: Recipe, run_dir: Path) -> Recipe:
    """Save what the steps of ``data.prepare`` have learned into the run directory, unless it has that already.

    Returns:
        The recipe that says where it is, and which it is.

    Raises:
        RequestError: the data is no longer what the run was fitted on.
    """
    data = recipe.data
    if not isinstance(data, TableConfig) or data.fitted is not None:
        return recipe
    folder = run_dir.absolute() / _FOLDER
    data = data.model_copy(update={"fitted": str(folder)})
    fitted = prepare_rows(data).fitted
    if not (folder / JSON_NAME).is_file():
        fitted.save(folder)
    return recipe.model_copy(update={"data": data.model_copy(update={"fitted_digest": fitted.digest})})


def with_fitted(recipe: Recipe, run_dir: Path) -> Recipe:
    """The recipe of a run that may have been moved: its fitted steps are where the run is now."""
    folder = run_dir.absolute() / _FOLDER
    if not isinstance(recipe.data, TableConfig) or not (folder / JSON_NAME).is_file():
        return recipe
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"fitted": str(folder)})})
