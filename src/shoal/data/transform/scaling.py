"""The step ``scale``: standard, min-max and robust scaling, in float64, as scikit-learn has them."""

import numpy as np

from shoal.data.table import Table
from shoal.data.transform.config import ScaleConfig
from shoal.data.transform.matrix import masked_of, matrix_of, need_some, numbers
from shoal.data.transform.moments import moments_of
from shoal.data.transform.quantiles import quantiles_of
from shoal.data.transform.state import StepState


def fit(table: Table, config: ScaleConfig, shards: int) -> StepState:
    """Centre and width of every column, by the values that are there.

    Raises:
        RequestError: a column has no value, or holds no numbers.
    """
    values, valid = masked_of(table, config.columns, step="scale")
    need_some(valid, config.columns, step="scale", num_rows=len(values))
    if config.how == "robust":
        there = [column if valid is None else column[valid[:, place]] for place, column in enumerate(values.T)]
        found = [quantiles_of([column], (0.25, 0.5, 0.75)) for column in there]
        quartiles = np.array(found)
        centre, width = quartiles[:, 1], quartiles[:, 2] - quartiles[:, 0]
    else:
        moments = moments_of(values, valid, shards, only="range" if config.how == "minmax" else "all")
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
