"""Steps against scikit-learn, on training rows only, and the same after they were saved."""

import warnings

import numpy as np
import pytest
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from sklearn.experimental import enable_iterative_imputer  # noqa: F401
from sklearn.impute import IterativeImputer, KNNImputer, SimpleImputer
from sklearn.linear_model import Ridge
from sklearn.preprocessing import MinMaxScaler, RobustScaler, StandardScaler

from shoal.core.config import Config, validate
from shoal.core.errors import RequestError, RunError
from shoal.data.partition.keys import digest_rows, mix
from shoal.data.table import Table, number_column, text_column
from shoal.data.transform.config import StepConfig
from shoal.data.transform.filling import nearest_places
from shoal.data.transform.learned import first_centres, nearest_of
from shoal.data.transform.pipeline import apply_steps, fit_steps
from shoal.data.transform.state import load_fitted

ROWS, NAMES = 6000, ("a", "b", "c")


class Steps(Config):
    """Some steps."""

    prepare: tuple[StepConfig, ...]
    """In order."""


def steps_of(*steps):
    return validate(Steps, {"prepare": list(steps)}, origin="a.toml").prepare


def matrix(table, names=NAMES):
    return np.stack([table[name].values for name in names], axis=1)


def fit(table, *steps, shards=1):
    rows = np.arange(len(table))
    return fit_steps(table, rows, steps_of(*steps), train_digest=digest_rows(rows), shards=shards)


@pytest.fixture(scope="module")
def values():
    draws = np.random.default_rng(0)
    found = draws.normal(size=(ROWS, 3)) * (1, 100, 0.01) + (5, -3, 0)
    found[:, 2] += 0.001 * found[:, 0]
    found[draws.random(found.shape) < 0.1] = np.nan
    return found


@pytest.fixture(scope="module")
def holed(values):
    """What is missing is no NaN here."""
    return Table.of(
        [
            number_column(name, np.nan_to_num(values[:, place]), ~np.isnan(values[:, place]))
            for place, name in enumerate(NAMES)
        ]
    )


@pytest.fixture(scope="module")
def whole(values):
    filled = SimpleImputer().fit_transform(values)
    return Table.of([number_column(name, filled[:, place].copy()) for place, name in enumerate(NAMES)])


@pytest.mark.parametrize(
    ("how", "theirs"), [("standard", StandardScaler()), ("minmax", MinMaxScaler()), ("robust", RobustScaler())]
)
def test_scaling_is_scikit_learns(values, holed, how, theirs):
    found = fit(holed, {"step": "scale", "columns": NAMES, "how": how}).train
    wanted = theirs.fit_transform(values)
    there = ~np.isnan(values)
    assert np.abs(matrix(found)[there] - wanted[there]).max() < 1e-12
    assert all((found[name].valid == there[:, place]).all() for place, name in enumerate(NAMES))


@pytest.mark.parametrize(("how", "theirs"), [("mean", "mean"), ("median", "median"), ("mode", "most_frequent")])
def test_simple_filling_is_scikit_learns(values, holed, how, theirs):
    found = fit(holed, {"step": "fill", "columns": NAMES, "how": how}).train
    assert matrix(found) == pytest.approx(SimpleImputer(strategy=theirs).fit_transform(values), rel=1e-12, abs=1e-12)


def test_filling_by_neighbours_is_scikit_learns(values, holed):
    found = fit(holed.slice(0, 300), {"step": "fill", "columns": NAMES, "how": "neighbours", "neighbours": 4}).train
    assert matrix(found) == pytest.approx(KNNImputer(n_neighbors=4).fit_transform(values[:300]), rel=1e-10)


def test_filling_by_a_model_is_scikit_learns(values, holed):
    step = {"step": "fill", "columns": NAMES, "how": "model", "rounds": 3}
    found = fit(holed, step).train
    theirs = IterativeImputer(Ridge(alpha=1.0), max_iter=3, tol=0.0, imputation_order="roman")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = theirs.fit_transform(values)
    assert np.abs((matrix(found) - wanted) / wanted.std(axis=0)).max() < 1e-10


def test_directions_and_centres_are_scikit_learns(whole):
    found = fit(
        whole,
        {"step": "pca", "columns": NAMES, "to": "p"},
        {"step": "kmeans", "columns": NAMES, "to": "k", "clusters": 3},
    )
    theirs = PCA(2, svd_solver="covariance_eigh").fit(matrix(whole)).components_
    directions = found.fitted.steps[0].arrays["directions"]
    assert np.abs(np.abs((directions * theirs).sum(axis=1)) - 1).max() < 1e-10
    start = first_centres(matrix(whole)[np.arange(4096) * ROWS // 4096], 3, 0)
    centres = KMeans(3, init=start, n_init=1, max_iter=20, tol=0, algorithm="lloyd").fit(matrix(whole)).cluster_centers_
    assert found.fitted.steps[1].arrays["centres"] == pytest.approx(centres, rel=1e-9, abs=1e-9)


def test_any_number_of_shards_fits_the_same_bits(holed):
    steps = [
        {"step": "filter", "columns": ["a"], "how": "zscore", "deviations": 3},
        {"step": "fill", "columns": NAMES, "how": "model", "rounds": 2},
        {"step": "scale", "columns": NAMES},
        {"step": "pca", "columns": NAMES, "to": "p"},
        {"step": "kmeans", "columns": NAMES, "to": "k", "clusters": 3, "rounds": 3},
    ]
    assert len({fit(holed, *steps, shards=shards).fitted.digest for shards in (1, 2, 3, 5, 8)}) == 1


def test_what_was_saved_prepares_alike_and_a_changed_byte_is_seen(holed, tmp_path):
    steps = [{"step": "fill", "columns": NAMES}, {"step": "scale", "columns": NAMES, "how": "robust"}]
    made = fit(holed, *steps)
    made.fitted.save(tmp_path)
    loaded = load_fitted(tmp_path)
    assert loaded.digest == made.fitted.digest
    again = apply_steps(holed, steps_of(*steps), loaded)
    assert matrix(again).tobytes() == matrix(made.train).tobytes()
    part = apply_steps(holed.slice(7, 9), steps_of(*steps), loaded)
    assert matrix(part).tobytes() == matrix(again)[7:9].tobytes(), "a row does not depend on those beside it"
    with pytest.raises(RequestError, match="other steps"):
        apply_steps(holed, steps_of(*steps[:1]), loaded)
    path = tmp_path / "fitted.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(RequestError, match="torn or altered"):
        load_fitted(tmp_path)


def test_a_fit_on_held_out_rows_is_refused(holed):
    train = np.arange(100)
    steps = steps_of({"step": "scale", "columns": NAMES})
    with pytest.raises(RunError, match="fitted on training rows only"):
        fit_steps(holed.slice(0, 101), np.arange(101), steps, train_digest=digest_rows(train))
    with pytest.raises(RunError, match="fitted on training rows only"):
        fit_steps(holed.slice(1, 101), np.arange(1, 101), steps, train_digest=digest_rows(train))


@pytest.fixture
def mixed():
    return Table.of(
        [
            text_column("t", ["ab", "b", None, "ab"]),
            number_column("n", np.array([1.0, 2.0, 30.0, 1.0])),
            number_column(
                "w", np.array(["2026-11-18T20:05", "2024-02-29", "1969-12-31T23:59", "2026-01-05"], "<M8[us]")
            ),
        ]
    )


def test_features(mixed):
    made = fit(
        mixed,
        {"step": "date", "columns": ["w"], "parts": ["year", "month", "day", "weekday", "hour", "minute"]},
        {"step": "ngrams", "columns": ["t"], "size": 1, "buckets": 64},
        {"step": "bucket", "columns": ["n"], "edges": [2, 10]},
    ).train
    rows = [
        [int(made[f"w_{part}"].values[row]) for part in ("year", "month", "day", "weekday", "hour", "minute")]
        for row in range(3)
    ]
    assert rows == [[2026, 11, 18, 2, 20, 5], [2024, 2, 29, 3, 0, 0], [1969, 12, 31, 2, 23, 59]]
    assert made["n"].values.tolist() == [0, 1, 2, 0] and made["t"].values.sum(axis=1).tolist() == [2, 1, 0, 2]
    ids = fit(mixed, {"step": "vocabulary", "columns": ["t"]}).train["t"].values.tolist()
    assert ids == [1, 2, 0, 1]
    assert fit(mixed, {"step": "hash", "columns": ["t"], "buckets": 1000}).train["t"].values[0] == 979


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"how": "missing", "columns": ["t"]}, [0, 1, 3]),
        ({"how": "duplicates", "columns": ["t", "n"]}, [0, 1, 2]),
        ({"how": "range", "columns": ["n"], "most": 2}, [0, 1, 3]),
        ({"how": "zscore", "columns": ["n"], "deviations": 1.5}, [0, 1, 3]),
        ({"how": "near_duplicates", "columns": ["t"]}, [0, 1, 2]),
    ],
    ids=str,
)
def test_filters(mixed, settings, kept):
    assert fit(mixed, {"step": "filter"} | settings).rows.tolist() == kept


def test_texts_that_are_nearly_the_same(mixed):
    text = "the quick brown fox jumps over the lazy dog and runs into the deep dark forest behind the house"
    table = Table.of(
        [text_column("t", [text, text + "s", "something else entirely that nobody has written", text.upper()])]
    )
    assert fit(table, {"step": "filter", "how": "near_duplicates", "columns": ["t"]}).rows.tolist() == [0, 2]


def test_a_signature_by_many_keys_at_once_has_the_bits_of_one_after_another():
    numbers, keys = np.arange(50, dtype=np.uint64) << np.uint64(57), [0, 1, 2**64 - 1, 12345]
    at_once = mix(numbers, np.array(keys, dtype=np.uint64)[:, None])
    assert (at_once == np.stack([mix(numbers, key) for key in keys])).all()


def test_an_isolation_forest_finds_what_is_far_away():
    points = np.random.default_rng(0).normal(size=(200, 2))
    points[7] = 50
    table = Table.of([number_column(name, points[:, place].copy()) for place, name in enumerate("ab")])
    rows = fit(table, {"step": "filter", "how": "forest", "columns": ["a", "b"]}).rows
    assert 7 not in rows.tolist() and len(rows) >= 195


def test_the_row_before_fills_and_nothing_comes_from_the_future():
    column = number_column("x", np.array([0, 0, 1, 0, 5]), np.array([False, False, True, False, True]))
    table, step = Table.of([column]), {"step": "fill", "columns": ["x"], "how": "forward"}
    assert fit(table, step | {"value": 9}).train["x"].values.tolist() == [9, 9, 1, 1, 5]
    with pytest.raises(RequestError, match="no value before row 1; say value"):
        fit(table, step)
    behind = fit(Table.of([column.slice(2, 5)]), step)
    assert behind.train["x"].values.tolist() == [1, 1, 5]
    # What is held out comes after the last training row; the training rows themselves do not, read anew or not.
    assert apply_steps(table, steps_of(step), behind.fitted)["x"].values.tolist() == [5, 5, 1, 1, 5]
    with pytest.raises(RequestError, match="no value before row 1; say value"):
        apply_steps(table, steps_of(step), behind.fitted, is_training=True)
    nans = number_column("x", np.array([2.0, np.nan]))
    made = fit(Table.of([nans]), step | {"nan": True})
    assert made.fitted.steps[0].values["values"] == [2.0]


def test_what_is_kept_of_many_rows_is_spread_over_all_of_them():
    """Of rows in the order of time the first ones know nothing of the last ones."""
    rows = 40_000
    base = np.arange(rows, dtype=np.float64)
    known = np.ones(rows, np.bool_)
    known[-1] = False
    table = Table.of([number_column("a", base), number_column("b", base * 2, known)])
    made = fit(table, {"step": "fill", "columns": ["a", "b"], "how": "neighbours", "neighbours": 1})
    assert len(made.fitted.steps[0].arrays["rows"]) == 1 << 14
    assert made.train["b"].values[-1] == pytest.approx(2 * rows, rel=1e-3)
    two = Table.of([number_column("a", (base > rows / 2) * 1.0)])
    centres = fit(two, {"step": "kmeans", "columns": ["a"], "to": "k", "clusters": 2}).fitted.steps[0].arrays["centres"]
    assert sorted(centres.ravel()) == [0, 1]


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ({"step": "scale", "columns": ["t"]}, "column 't' is text"),
        ({"step": "scale", "columns": ["x"]}, "there is no column 'x'"),
        ({"step": "vocabulary", "columns": ["t"], "most": 1}, "has 2 values or more and most is 1"),
        ({"step": "pca", "columns": ["n"], "to": "p", "components": 4}, "ask for fewer"),
        ({"step": "filter", "how": "range", "columns": ["n"], "least": 99}, "leaves none of 4"),
        ({"step": "date", "columns": ["n"]}, "say its type"),
    ],
    ids=str,
)
def test_what_cannot_be_fitted(mixed, step, said):
    with pytest.raises(RequestError, match=said):
        fit(mixed, step)


def test_a_fit_on_an_empty_column_is_refused():
    table = Table.of([number_column("x", np.zeros(5), np.zeros(5, np.bool_))])
    for step in ({"step": "scale"}, {"step": "fill"}, {"step": "fill", "how": "mode"}, {"step": "bucket"}):
        with pytest.raises(RequestError, match="column 'x' has no value in the 5 training rows"):
            fit(table, step | {"columns": ["x"]})


def test_nan_is_refused_or_filled():
    table = Table.of([number_column("x", np.array([1.0, np.nan, 3.0]))])
    with pytest.raises(RequestError, match="has nan in row 2, which is no missing value"):
        fit(table, {"step": "scale", "columns": ["x"]})
    assert fit(table, {"step": "fill", "columns": ["x"], "nan": True}).train["x"].values.tolist() == [1, 2, 3]


@pytest.mark.parametrize("offset", [0.0, 1e9])
@pytest.mark.parametrize("clusters", [1, 5, 300])
def test_the_nearest_centre_is_the_one_at_the_least_distance(offset, clusters):
    draws = np.random.default_rng(0)
    rows, centres = draws.normal(size=(9000, 3)) + offset, draws.normal(size=(clusters, 3)) + offset
    distances = np.stack([((rows - centre) ** 2).sum(axis=1) for centre in centres])
    assert (nearest_of(rows, centres) == distances.argmin(axis=0)).all()
    twice = np.concatenate([centres, centres])
    assert nearest_of(rows, twice).max() < clusters, "of those equally near it is the first"


def test_of_neighbours_equally_far_the_first_ones_are_taken():
    far = np.array([2.0, 1.0, np.inf, 1.0, 0.0, 1.0])
    assert nearest_places(far, 3).tolist() == [4, 1, 3] and nearest_places(far, 9).tolist() == [4, 1, 3, 5, 0]
    assert nearest_places(np.full(3, np.inf), 2).tolist() == []
    ties = np.random.default_rng(1).integers(0, 5, size=400).astype(np.float64)
    assert nearest_places(ties, 150).tolist() == np.argsort(ties, kind="stable")[:150].tolist()
