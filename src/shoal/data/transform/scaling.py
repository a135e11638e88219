"""The step ``scale``: standard, min-max and robust scaling, in float64, as scikit-learn has them."""

import numpy as np

from shoal.data.table import Table
from shoal.data.transform.blocks import TrainingRows, moments_of_rows, quantiles_of_rows
from shoal.data.transform.config import ScaleConfig
from shoal.data.transform.matrix import matrix_of, numbers
from shoal.data.transform.moments import Wanted
from shoal.data.transform.state import StepState


def fit(rows: TrainingRows, config: ScaleConfig, shards: int) -> StepState:
    """Centre and width of every column, by the values that are there.

    Raises:
        RequestError: a column has no value, or holds no numbers.
    """
    if config.how == "robust":
        quartiles = quantiles_of_rows(rows, config.columns, (0.25, 0.5, 0.75), step="scale")
        centre, width = quartiles[:, 1], quartiles[:, 2] - quartiles[:, 0]
    else:
        wanted: Wanted = "range" if config.how == "minmax" else "all"
        moments = moments_of_rows(rows, config.columns, step="scale", only=wanted, shards=shards)
        if config.how == "minmax":
            centre, width = moments.least, moments.most - moments.least
        else:
            variance = moments.variance
            # A column of one value: what is left of it is rounding.
            bound = (
                moments.count * np.finfo(np.float64).eps * variance
                + (moments.count * moments.mean * np.finfo(np.float64).eps) ** 2
            )
            centre, width = moments.mean, np.sqrt(np.where(variance <= bound, 0.0, variance))
    return StepState(arrays={"centre": centre, "width": np.where(width == 0, 1.0, width)})


def apply(table: Table, config: ScaleConfig, state: StepState) -> Table:
    """The columns on their new scale."""
    values, valid = matrix_of(table, config.columns, step="scale")
    scaled = (values - state.arrays["centre"]) / state.arrays["width"]
    return table.replace(
        {
            name: numbers(name, np.where(valid[:, place], scaled[:, place], 0.0), valid[:, place])
            for place, name in enumerate(config.columns)
        }
    )
