"""What fitting costs: CPU seconds of Shoal's steps beside scikit-learn's on the same numbers, interleaved."""

import statistics
import time
import warnings
from collections.abc import Callable

import numpy as np
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import MinMaxScaler, RobustScaler, StandardScaler

from shoal.data.table import Table, number_column
from shoal.data.transform import filling, scaling
from shoal.data.transform.config import FillConfig, ScaleConfig

ROWS, COLUMNS, ROUNDS = 1_000_000, 8, 3


def cpu_seconds(call: Callable[[], object]) -> float:
    before = time.process_time()
    call()
    return time.process_time() - before


def measure_fit() -> dict[str, object]:
    values = np.random.default_rng(0).normal(size=(ROWS, COLUMNS)) * 10.0 ** np.arange(-4, 4)
    values[np.random.default_rng(1).random(values.shape) < 0.05] = np.nan
    names = tuple(f"c{place}" for place in range(COLUMNS))
    valid = ~np.isnan(values)
    table = Table.of(
        [
            number_column(name, np.nan_to_num(values[:, place]), valid[:, place].copy())
            for place, name in enumerate(names)
        ]
    )
    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {}
    for how, theirs in (("standard", StandardScaler()), ("minmax", MinMaxScaler()), ("robust", RobustScaler())):
        config = ScaleConfig(step="scale", columns=names, how=how)
        pairs[how] = (lambda config=config: scaling.fit(table, config, 1), lambda theirs=theirs: theirs.fit(values))
    for how in ("mean", "median"):
        fill = FillConfig(step="fill", columns=names, how=how)
        imputer = SimpleImputer(strategy=how)
        pairs[f"fill {how}"] = (
            lambda fill=fill: filling.fit(table, fill, 1),
            lambda imputer=imputer: imputer.fit(values),
        )
    results: dict[str, object] = {"rows": ROWS, "columns": COLUMNS}
    for name, (ours, theirs_fit) in pairs.items():
        seconds: tuple[list[float], list[float]] = ([], [])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(ROUNDS):
                for place, call in enumerate((ours, theirs_fit)):
                    seconds[place].append(cpu_seconds(call))
        own, other = (statistics.median(each) for each in seconds)
        results[name] = {"shoal_s": own, "sklearn_s": other, "ratio": own / other}
        print(f"{name:12} shoal {own:.3f} s  scikit-learn {other:.3f} s  ratio {own / other:.2f}")
    return results
