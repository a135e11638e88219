"""From rows as they were read to what a run's model takes, for whoever has the model and not the run: the folder ``prepare``
beside an export, and in a run's own folder.

It holds what the steps of ``data.prepare`` have learned, and here the columns: their types, which of them the model takes, and
which is predicted. Rows go through ``apply_steps`` and ``tensor_of`` as those of training did, so the model is given
the same bits.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from shoal.core.config import Config, validate
from shoal.core.errors import RequestError, RunError, did_you_mean
from shoal.data.formats.kinds import Unfit, column_of_values
from shoal.data.prepare import ModelColumns, tensor_of
from shoal.data.table import Field, Schema, Table
from shoal.data.transform.config import AnyStep, StepConfig
from shoal.data.transform.pipeline import apply_steps
from shoal.data.transform.state import ARRAYS_NAME, JSON_NAME, Fitted, load_fitted

COLUMNS_NAME = "columns.json"
FOLDER = "prepare"
"""Of an export."""
FILES = (ARRAYS_NAME, COLUMNS_NAME, JSON_NAME)
"""In the folder."""
_FORMAT = 1


class _Steps(Config):
    """The steps as a state names them."""

    prepare: tuple[StepConfig, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """The function from raw rows to a model's inputs."""

    schema: Schema
    """Columns as they are read."""
    inputs: Mapping[str, tuple[str, ...]]
    """Columns of each input by its name; of one without a name under the empty one."""
    targets: tuple[str, ...]
    steps: tuple[AnyStep, ...]
    fitted: Fitted

    @property
    def given(self) -> tuple[Field, ...]:
        """The columns that whoever asks for a prediction gives: all but those that are predicted."""
        return tuple(field for field in self.schema.fields if field.name not in self.targets)

    @property
    def labels(self) -> tuple[Any, ...]:
        """Names of the classes, by their ids; empty where numbers are predicted."""
        return self.fitted.labels.get(self.targets[0], ())

    def prepare(self, table: Table) -> dict[str, NDArray[Any]]:
        """The inputs of these rows; nothing is left out by filters.

        Raises:
            RequestError: a column is not there, or a value is missing that no step fills.
        """
        made = apply_steps(table, self.steps, self.fitted)
        return {name: tensor_of(made, columns, "the rows that are asked for") for name, columns in self.inputs.items()}

    def prepare_values(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, NDArray[Any]]:
        """The inputs of rows of JSON; a column that a row does not name is missing, the target's may always be.

        Raises:
            RequestError: there is no row, no column of a name, or a value of another type; says the row and the column.
        """
        if not rows:
            raise RequestError("there is no row to predict; give one at least")
        for place, row in enumerate(rows):
            unknown = [name for name in row if name not in self.schema.names]
            if unknown:
                near = did_you_mean(unknown[0], self.schema.names)
                raise RequestError(f"row {place + 1}: there is no column {unknown[0]!r}; {near}")
        columns = []
        for field in self.schema.fields:
            try:
                columns.append(column_of_values(field.name, [row.get(field.name) for row in rows], field.kind))
            except Unfit as unfit:
                raise RequestError(f"row {unfit.place + 1}, column {field.name!r}: {unfit.why}") from unfit
        return self.prepare(Table.of(columns))


def save_columns(rows: ModelColumns, folder: Path) -> None:
    """Write the columns of a run beside what was fitted."""
    body = {
        "format": _FORMAT,
        "fitted": rows.fitted.digest,
        "schema": [{"name": one.name, "kind": one.kind, "shape": list(one.shape)} for one in rows.schema.fields],
        "inputs": {name: list(columns) for name, columns in rows.inputs.items()},
        "targets": list(rows.targets),
    }
    text = json.dumps({"digest": _digest(body), "columns": body}, ensure_ascii=True)
    (folder / f"{COLUMNS_NAME}.part").write_text(text)
    os.replace(folder / f"{COLUMNS_NAME}.part", folder / COLUMNS_NAME)


def load_preparation(folder: Path) -> Preparation:
    """What an export or a run has in its folder.

    Raises:
        RequestError: there is nothing, or it is torn, altered, or of another fit.
    """
    fitted = load_fitted(folder)
    try:
        whole = json.loads((folder / COLUMNS_NAME).read_text())
        body = whole["columns"]
        if _digest(body) != whole["digest"] or body["format"] != _FORMAT:
            raise ValueError("its digest or format is another")
        if body["fitted"] != fitted.digest:
            raise ValueError("it is of another fit")
        fields = tuple(Field(name=one["name"], kind=one["kind"], shape=tuple(one["shape"])) for one in body["schema"])
        inputs = {name: tuple(columns) for name, columns in body["inputs"].items()}
        steps = json.loads(fitted.recipe)
        targets = tuple(body["targets"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(
            f"{folder / COLUMNS_NAME} is missing, torn or altered: {error}; export the run again"
        ) from error
    checked = validate(_Steps, {"prepare": steps}, origin=str(folder / JSON_NAME))
    return Preparation(
        schema=Schema(fields=fields), inputs=inputs, targets=targets, steps=checked.prepare, fitted=fitted
    )


def read_preparation(run_data: Path) -> dict[str, bytes]:
    """The files of a run's preparation by their names; none of a run whose data needs none.

    Raises:
        OSError: they cannot be read.
    """
    if not (run_data / COLUMNS_NAME).is_file():
        return {}
    return {name: (run_data / name).read_bytes() for name in FILES}


def export_preparation(run_data: Path, export: Path) -> Path | None:
    """Copy a run's preparation into the folder of an export.

    Args:
        run_data: the folder ``data`` of the run.
        export: where to; it exists.

    Returns:
        The folder; None of a run whose data needs none.

    Raises:
        RequestError: what the run has is torn or altered.
        RunError: the disk refused.
    """
    if not (run_data / COLUMNS_NAME).is_file():
        return None
    load_preparation(run_data)
    target = export / FOLDER
    try:
        target.mkdir()
        for name in FILES:
            shutil.copyfile(run_data / name, target / name)
    except OSError as error:
        raise RunError(f"cannot write what prepares rows to {target}: {error}") from error
    return target


def _digest(body: Any) -> str:
    return hashlib.blake2b(json.dumps(body, sort_keys=True).encode(), digest_size=16).hexdigest()
