"""Rows of a store that go through steps: the bits of the same rows as a table, what is kept, what grows, and what is refused."""

import numpy as np
import pytest
import torch

from shoal.core.config import validate
from shoal.core.errors import RequestError, RunError
from shoal.data.build import build_splits
from shoal.data.check import check_data
from shoal.data.config import StoreConfig, TableConfig
from shoal.data.fingerprint import list_differences, take_fingerprint
from shoal.data.fitted import keep_fitted, with_fitted
from shoal.data.partition.cut import cut_table
from shoal.data.prepare import open_rows, prepare_rows
from shoal.data.rawrows import load_preparation
from shoal.data.sources import preparedstore
from shoal.data.sources.storefile import open_store_data
from shoal.data.spec import IGNORED
from shoal.data.store.blockwriter import BlockOptions
from shoal.data.store.folder import open_folder
from shoal.data.store.reader import StoreReader
from shoal.data.store.selection import RowSelection
from shoal.data.store.splits import Split, write_split
from shoal.data.store.writer import BuildOptions, append_store, build_store
from shoal.data.table import concat_tables
from shoal.data.transform import blocks
from shoal.data.transform.moments import BLOCK

torch.set_num_threads(1)
ROWS = 2 * BLOCK + 900
SMALL = BuildOptions(block=BlockOptions(target_bytes=1 << 15))
STEPS = [
    {"step": "filter", "columns": ["x"], "how": "zscore", "deviations": 3},
    {"step": "fill", "columns": ["x", "y"], "how": "model", "rounds": 2},
    {"step": "fill", "columns": ["n"], "how": "mode"},
    {"step": "vocabulary", "columns": ["word"]},
    {"step": "hash", "columns": ["other"], "buckets": 50},
    {"step": "date", "columns": ["when"], "parts": ["hour"]},
    {"step": "scale", "columns": ["x", "when_hour"]},
    {"step": "scale", "columns": ["y"], "how": "robust"},
    {"step": "pca", "columns": ["x", "y", "n"], "to": "p"},
    {"step": "kmeans", "columns": ["x", "y"], "to": "k", "clusters": 3, "rounds": 3},
    {"step": "bucket", "columns": ["n"], "buckets": 4},
]
COMMON = {
    "inputs": {"numbers": ["x", "y", "n", "when_hour", "p"], "ids": ["word", "other", "k"]},
    "target": "label",
    "prepare": STEPS,
    "validation": 0.1,
    "test": 0.1,
}


def lines_of(first, count, labels="ab"):
    draws = np.random.default_rng(first)
    for row in range(first, first + count):
        y, n = ("" if draws.random() < 0.1 else f"{draws.normal() * 9:.3f}" for _ in range(2))
        when = f"2026-01-0{1 + row % 5}T{row % 24:02}:00"
        yield f"{draws.normal():.3f},{y},{n},w{row % 4},o{row % 70},{when},{labels[row % len(labels)]}"


def write(path, first, count, labels="ab"):
    path.write_text("\n".join(["x,y,n,word,other,when,label", *lines_of(first, count, labels)]) + "\n")
    return list(open_rows(validate(TableConfig, {"source": "table", "path": str(path)}, origin="a")).tables())


def table_of(folder, **more):
    return validate(TableConfig, {"source": "table", "path": str(folder / "rows.csv")} | COMMON | more, origin="a")


def store_of(folder, **more):
    given = {"source": "store", "path": str(folder / "store"), "split": "cut"} | COMMON | more
    return validate(StoreConfig, given, origin="a")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A file, and a store of its rows that keeps the cut of the table."""
    folder = tmp_path_factory.mktemp("prepared")
    tables = write(folder / "rows.csv", 0, ROWS)
    build_store(tables, str(folder / "store"), options=SMALL)
    config = table_of(folder)
    cut = cut_table(concat_tables(tables), config.cut, validation=0.1, test=0.1, where="rows.csv")
    parts = {name: RowSelection.of(rows) for name, rows in cut.rows.items()}
    write_split(open_folder(str(folder / "store")), Split(name="cut", version=1, num_rows=ROWS, parts=parts))
    return folder


@pytest.fixture
def grows(tmp_path):
    """A small store of its own."""
    build_store(write(tmp_path / "rows.csv", 0, 300), str(tmp_path / "store"), options=SMALL)
    return tmp_path


def bits(items):
    return [tensor.numpy().tobytes() for tensor in (*items.inputs, items.targets)], items.weight


def test_every_batch_has_the_bits_of_the_table(made):
    """So a run from the store is the run from the files; the fits, the vocabulary and the digest of both are one."""
    ours, theirs = build_splits(store_of(made), 0), build_splits(table_of(made), 0)
    assert ours.spec == theirs.spec and ours.spec.kind == "own" and ours.spec.classes == 2
    fitted = open_store_data(store_of(made)).prepared.columns.fitted
    assert fitted.digest == prepare_rows(table_of(made)).fitted.digest and len(fitted.steps) == len(STEPS)
    for name in ("train", "validation", "test"):
        own, other = getattr(ours, name), getattr(theirs, name)
        assert len(own) == len(other) > 0 and own.uniform_weight == other.uniform_weight == 1
        assert own.collate([0]).form == other.collate([0]).form is not None
        order = np.random.default_rng(1).permutation(len(own))
        for start, size in [(0, 1), (1, 1), (2, 7), (9, 500)]:
            assert bits(own.collate(order[start : start + size])) == bits(other.collate(order[start : start + size]))
    assert list_differences(take_fingerprint(ours), take_fingerprint(ours), here="", there="") == []
    assert ours.train.vocabulary == theirs.train.vocabulary != ""


def test_a_fit_reads_blocks_and_any_number_of_them_at_a_time_gives_the_same_bits(made, monkeypatch):
    for name in ("GROUP", "_READ"):
        monkeypatch.setattr(blocks, name, BLOCK)
    config = store_of(made)
    data = open_store_data(config.model_copy(update={"prepare": (), "inputs": ("x",), "labels": None, "target": "x"}))
    sizes, read = [], StoreReader.read
    monkeypatch.setattr(StoreReader, "read", lambda self, rows: sizes.append(len(rows)) or read(self, rows))
    found = set()
    for shards in (1, 2, 5):
        preparedstore._fit_once.cache_clear()
        found.add(preparedstore.prepare_store(config, data.reader, data.parts, shards=shards).columns.fitted.digest)
    assert len(found) == 1 and max(sizes) <= BLOCK < ROWS


def test_what_was_fitted_is_kept_with_the_run_and_nothing_is_fitted_again(made, tmp_path, monkeypatch):
    kept = keep_fitted(store_of(made), tmp_path / "run")
    assert kept.fitted == str(tmp_path / "run" / "data") and len(kept.fitted_digest) == 32
    (tmp_path / "run").rename(tmp_path / "moved")
    moved = with_fitted(kept, tmp_path / "moved")
    monkeypatch.setattr(preparedstore, "fit_rows", lambda *_, **__: pytest.fail("it is fitted again"))
    ours = build_splits(moved, 0)
    assert bits(ours.test.collate([0, 5])) == bits(build_splits(table_of(made), 0).test.collate([0, 5]))
    # Whoever serves the model gives rows as they were read.
    preparation = load_preparation(tmp_path / "moved" / "data")
    row = {"x": 0.5, "y": None, "n": 2.0, "word": "w1", "other": "o3", "when": "2026-01-01T05:00"}
    assert set(preparation.prepare_values([row])) == {"numbers", "ids"} and preparation.labels == ("a", "b")
    with pytest.raises(RequestError, match="have seen other rows than those of the training split now"):
        build_splits(moved.model_copy(update={"split": None}), 0)


def test_rows_that_are_appended_go_through_what_was_fitted_at_the_start(grows):
    splits = build_splits(store_of(grows, split=None, follow=True), 0)
    train, made = splits.train, splits.train._data.prepared
    count, digest = len(train), made.columns.fitted.digest
    before = bits(train.collate(range(count)))
    added = write(grows / "more.csv", 1000, 200)
    append_store(added, str(grows / "store"))
    append_store(write(grows / "last.csv", 5000, 50), str(grows / "store"))
    train.grow(2)
    first = len(train)
    train.grow(3)
    assert train._data.prepared.columns.fitted.digest == digest and bits(train.collate(range(count))) == before
    # The filter leaves out rows of what was added too, by the mean and the deviation of the start.
    state = made.columns.fitted.steps[0]
    x = concat_tables(added)["x"].values
    kept = np.abs(x - state.arrays["mean"][0]) <= 3 * state.arrays["deviation"][0]
    assert first - count == kept.sum() < 200 and first < len(train) <= first + 50
    scaled = train.collate(range(count, first)).inputs[0][:, 0].numpy()
    scale = made.columns.fitted.steps[6]
    assert scaled == pytest.approx((x[kept] - scale.arrays["centre"][0]) / scale.arrays["width"][0], abs=1e-5)
    whole = bits(train.collate(range(len(train))))
    # Back to a checkpoint of the version before, and on again.
    train.grow(2)
    assert (train.version, len(train)) == (2, first) and bits(train.collate(range(count))) == before
    train.grow(3)
    assert bits(train.collate(range(len(train)))) == whole
    # A run that goes on reads both at once, and has the same rows.
    again = build_splits(store_of(grows, split=None, follow=True, version=1), 0).train
    again.grow(3)
    assert len(again) == len(train) and bits(again.collate(range(len(again)))) == bits(train.collate(range(len(again))))


def test_labels_that_come_later_are_refused_or_counted(grows):
    settings = {"split": None, "follow": True, "inputs": ["x"], "prepare": STEPS[:2]}
    strict = build_splits(store_of(grows, **settings), 0).train
    counted = build_splits(store_of(grows, **settings, labels={"unknown": "count"}), 0).train
    append_store(write(grows / "more.csv", 300, 30, labels="abc"), str(grows / "store"))
    with pytest.raises(RunError, match=r"has \d+ rows with labels of 'label' that the model was not made for, 'c' the"):
        strict.grow(2)
    assert strict.version == 1 and counted.uniform_weight is None
    count = len(counted)
    counted.grow(2)
    items = counted.collate(range(count, len(counted)))
    strange = int((items.targets == IGNORED).sum())
    said = check_data(store_of(grows, **settings, labels={"unknown": "count"})).description
    assert "10 rows of the test split have an unknown label and count for nothing" in said
    assert 0 < strange == counted._data.prepared.unknown[0] and items.weight == len(items.targets) - strange


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"inputs": ["x"], "prepare": [{"step": "filter", "columns": ["x"], "how": "duplicates"}]},
            "looks at all rows at once",
        ),
        (
            {"inputs": ["x"], "prepare": [{"step": "fill", "columns": ["y"], "how": "forward"}]},
            "fills from the row before",
        ),
        (
            {"inputs": ["x"], "prepare": [{"step": "scale", "columns": ["xx"]}]},
            "there is no column 'xx' in .* did you mean 'x'",
        ),
        ({"inputs": ["x"], "prepare": [{"step": "scale", "columns": ["word"]}]}, "step 'scale': column 'word' is text"),
        ({"inputs": ["word"], "prepare": []}, "column 'word' is text, and the model takes numbers"),
        (
            {"inputs": ["y"], "prepare": [{"step": "scale", "columns": ["y"]}]},
            r"column 'y' has \d+ missing values in the train split; write a step",
        ),
        (
            {"inputs": ["x"], "prepare": [], "target": "other", "labels": {"most": 5}},
            "column 'other' has more than 5 labels",
        ),
        ({"fitted_digest": "0" * 32}, "the training rows are others than they were"),
    ],
    ids=str,
)
def test_what_a_store_cannot_be_asked_for(grows, settings, words):
    with pytest.raises(RequestError, match=words):
        check_data(store_of(grows, **({"split": None} | settings)))


def test_a_missing_value_that_a_filter_leaves_out_is_none(grows):
    """Training rows without it are left out; of what is held out it is refused, as of a table."""
    steps = [{"step": "filter", "columns": ["y"], "how": "missing"}]
    settings = {"split": None, "inputs": ["x", "y"], "prepare": steps}
    whole = check_data(store_of(grows, **settings, validation=0, test=0))
    assert 0 < whole.train < 300
    with pytest.raises(RequestError, match=r"column 'y' has \d+ missing values in the validation split"):
        check_data(store_of(grows, **settings))


def test_labels_of_text_need_nothing_else(grows):
    plain = {"split": None, "prepare": [], "inputs": ["x"]}
    found = build_splits(store_of(grows, **plain), 0)
    assert found.spec.classes == 2 and found.train.collate([0, 1]).targets.tolist() == [0, 1]
    assert found.train.collate([0]).inputs[0].shape == (1, 1) and found.train.vocabulary.startswith("'label'")
    with pytest.raises(ValueError, match="sequence makes samples of token ids alone"):
        StoreConfig(path="x", sequence=4, prepare=({"step": "scale", "columns": ["x"]},))
