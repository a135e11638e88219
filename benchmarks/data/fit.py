"""What fitting costs: CPU seconds of Shoal's steps beside scikit-learn's on the same numbers, interleaved."""

import statistics
import time
import warnings
from collections.abc import Callable

import numpy as np
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from sklearn.impute import KNNImputer, SimpleImputer
from sklearn.preprocessing import MinMaxScaler, RobustScaler, StandardScaler

from shoal.data.table import Table, number_column
from shoal.data.transform import filling, learned, scaling
from shoal.data.transform.config import FillConfig, KmeansConfig, PcaConfig, ScaleConfig
from shoal.data.transform.pipeline import TableRows

ROWS, COLUMNS, ROUNDS = 1_000_000, 8, 3
CLUSTERED, LACKING = 200_000, 4000
"""Rows that are clustered, and rows whose missing values are taken from their neighbours."""

Pair = tuple[Callable[[], object], Callable[[], object]]


def cpu_seconds(call: Callable[[], object]) -> float:
    before = time.process_time()
    call()
    return time.process_time() - before


def rows_of(table: Table) -> TableRows:
    return TableRows(table=table, numbers=np.arange(len(table)))


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
    rows = rows_of(table)
    pairs: dict[str, Pair] = {}
    for how, theirs in (("standard", StandardScaler()), ("minmax", MinMaxScaler()), ("robust", RobustScaler())):
        config = ScaleConfig(step="scale", columns=names, how=how)
        pairs[how] = (lambda config=config: scaling.fit(rows, config, 1), lambda theirs=theirs: theirs.fit(values))
    pairs |= _learned(values)
    for how in ("mean", "median"):
        fill = FillConfig(step="fill", columns=names, how=how)
        imputer = SimpleImputer(strategy=how)
        pairs[f"fill {how}"] = (
            lambda fill=fill: filling.fit(rows, fill, 1),
            lambda imputer=imputer: imputer.fit(values),
        )
    results: dict[str, object] = {"rows": ROWS, "columns": COLUMNS, "clustered": CLUSTERED, "lacking": LACKING}
    for name, (ours, theirs_fit) in pairs.items():
        seconds: tuple[list[float], list[float]] = ([], [])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(ROUNDS):
                for place, call in enumerate((ours, theirs_fit)):
                    seconds[place].append(cpu_seconds(call))
        own, other = (statistics.median(each) for each in seconds)
        results[name] = {"shoal_s": own, "sklearn_s": other, "ratio": own / other}
        print(f"{name:24} shoal {own:.3f} s  scikit-learn {other:.3f} s  ratio {own / other:.2f}")
    return results


def _learned(values: np.ndarray) -> dict[str, Pair]:
    """Components and clusters of whole rows, by one pass of Lloyd's rule after another, and values taken from neighbours."""
    names = tuple(f"c{place}" for place in range(COLUMNS))
    whole = np.nan_to_num(values) / 10.0 ** np.arange(-4, 4)
    table, part = (
        Table.of([number_column(name, rows[:, place].copy()) for place, name in enumerate(names)])
        for rows in (whole, whole[:CLUSTERED])
    )
    pca = PcaConfig(step="pca", columns=names, components=4, to="pca")
    kmeans = KmeansConfig(step="kmeans", columns=names, clusters=8, rounds=10, to="cluster")
    lloyd = KMeans(8, n_init=1, max_iter=10, tol=0, algorithm="lloyd", random_state=0)
    few = values[:LACKING]
    there = ~np.isnan(few)
    lacking = Table.of(
        [number_column(name, np.nan_to_num(few[:, place]), there[:, place].copy()) for place, name in enumerate(names)]
    )
    fill = FillConfig(step="fill", columns=names, how="neighbours")
    imputer = KNNImputer(n_neighbors=fill.neighbours)
    return {
        "pca": (lambda: learned.fit_pca(rows_of(table), pca, 1), lambda: PCA(4).fit(whole)),
        "kmeans": (lambda: learned.fit_kmeans(rows_of(part), kmeans, 1), lambda: lloyd.fit(whole[:CLUSTERED])),
        "fill neighbours, applied": (
            lambda: filling.apply(lacking, fill, filling.fit(rows_of(lacking), fill, 1)),
            lambda: imputer.fit_transform(few),
        ),
    }
