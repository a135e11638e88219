"""Samples of a store are those of the same data from arrays and token files, and what a recipe asks wrongly is told before."""

import os

import numpy as np
import pytest
import torch

from shoal.core.errors import RequestError, RunError
from shoal.data.build import build_splits
from shoal.data.check import check_data
from shoal.data.config import StoreConfig, TokensConfig
from shoal.data.fingerprint import list_differences, take_fingerprint
from shoal.data.growing import growing
from shoal.data.sources.storefile import pin_version
from shoal.data.store.blockwriter import BlockOptions
from shoal.data.store.building.tokenfiles import token_units
from shoal.data.store.folder import open_folder
from shoal.data.store.selection import RowSelection
from shoal.data.store.splits import Split, write_split
from shoal.data.store.writer import BuildOptions, append_store, build_store
from shoal.data.table import Table, number_column
from shoal.data.tiers.config import CacheConfig
from support.data.tables import make_table

torch.set_num_threads(1)

SMALL = BuildOptions(block=BlockOptions(target_bytes=1 << 14))


@pytest.fixture
def token_store(tmp_path):
    ids = np.random.default_rng(0).integers(0, 90, size=50_000).astype("<u2")
    np.save(tmp_path / "ids.npy", ids)
    units, schema = token_units(str(tmp_path / "ids.npy"), unit_bytes=30_000)
    assert len(units) == 4
    build_store(units, str(tmp_path / "store"), options=SMALL, schema=schema)
    return tmp_path


def numbers(num_rows):
    draw = np.random.default_rng(7)
    return Table.of(
        [
            number_column("picture", draw.random((num_rows, 2, 3))),
            number_column("weight", draw.random(num_rows)),
            number_column("label", draw.integers(0, 5, size=num_rows)),
        ]
    )


def same(one, other):
    assert len(one.inputs) == len(other.inputs) and one.weight == other.weight
    pairs = [*zip(one.inputs, other.inputs, strict=True), (one.targets, other.targets)]
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("load", ["whole", "blocks", "index"])
def test_every_sample_is_that_of_the_token_file(token_store, load):
    """So a run from the store is the run from the file, to the bit."""
    sizes = {"sequence": 64, "validation": 0.1, "test": 0.05}
    ours = build_splits(StoreConfig(path=str(token_store / "store"), load=load, **sizes), 0)
    theirs = build_splits(TokensConfig(path=str(token_store / "ids.npy"), **sizes), 0)
    assert ours.spec == theirs.spec
    for name in ("train", "validation", "test"):
        own, other = getattr(ours, name), getattr(theirs, name)
        assert len(own) == len(other) > 0 and own.uniform_weight == other.uniform_weight
        order = np.random.default_rng(1).permutation(len(own))
        for start in range(0, len(order), 50):
            same(own.collate(order[start : start + 50]), other.collate(order[start : start + 50]))


def test_rows_are_those_of_the_table(tmp_path):
    table = numbers(2000)
    build_store([table], str(tmp_path), options=SMALL)
    summary = check_data(StoreConfig(path=str(tmp_path), target="label"))
    data = build_splits(StoreConfig(path=str(tmp_path), target="label", inputs=("picture",)), 0)
    assert (summary.train, summary.validation, summary.test) == (1800, 100, 100)
    assert (data.spec.kind, data.spec.features, data.spec.classes) == ("classes", (2, 3), 5)
    ids = [3, 1799, 0]
    found = data.train.collate(ids)
    assert torch.equal(found.inputs[0], torch.from_numpy(table["picture"].values[ids].astype(np.float32)))
    assert found.targets.tolist() == table["label"].values[ids].tolist() and found.weight == 3
    assert data.test.collate([0]).targets.tolist() == [table["label"].value(1900)]
    # Several columns lie side by side, and a number that is no class is a regression.
    flat = build_splits(StoreConfig(path=str(tmp_path), target="weight"), 0)
    assert (flat.spec.kind, flat.spec.features, flat.spec.outputs) == ("regression", (7,), 1)
    row = flat.train.collate([5])
    assert (
        row.inputs[0].shape == (1, 7) and row.inputs[0][0, 6] == table["label"].value(5) and row.targets.shape == (1, 1)
    )
    two = build_splits(StoreConfig(path=str(tmp_path), targets=("weight", "label"), inputs=("picture",)), 0)
    assert two.spec.outputs == 2 and two.train.collate([0, 1]).targets.shape == (2, 2)


def test_whole_numbers_stay_what_they_are_or_are_refused(tmp_path):
    ids = np.arange(40) + (1 << 24)
    columns = [number_column("user", ids), number_column("label", ids % 2), number_column("x", ids / 2)]
    build_store([Table.of(columns)], str(tmp_path))
    config = StoreConfig(path=str(tmp_path), target="label", inputs=("user",))
    found = build_splits(config, 0).train.collate([0, 1]).inputs[0]
    assert found.dtype == torch.int64 and found.tolist() == [[1 << 24], [(1 << 24) + 1]]
    with pytest.raises(RequestError, match=r"column 'user' has 16777255, .* float32, which is exact up to 16777216"):
        check_data(config.model_copy(update={"inputs": ("x", "user")}))


def test_a_named_split_says_which_rows(tmp_path):
    table = numbers(100)
    build_store([table], str(tmp_path), options=SMALL)
    parts = {"train": RowSelection.of(np.arange(0, 100, 2)), "test": RowSelection.of(np.arange(1, 100, 2))}
    write_split(open_folder(str(tmp_path)), Split(name="odd", version=1, num_rows=100, parts=parts))
    append_store([numbers(10)], str(tmp_path))
    data = build_splits(StoreConfig(path=str(tmp_path), target="label", split="odd"), 0)
    assert (len(data.train), len(data.validation), len(data.test)) == (50, 0, 50)
    assert data.test.collate([3]).targets.tolist() == [table["label"].value(7)]


def test_a_pinned_version_stays_as_it_is_and_fingerprints_tell_versions_apart(token_store):
    path = str(token_store / "store")
    config = StoreConfig(path=path, sequence=64)
    pinned = pin_version(config)
    assert pinned.version == 1 and pin_version(pinned) is pinned
    before = take_fingerprint(build_splits(pinned, 0))
    append_store([Table.of([number_column("tokens", np.zeros(100, dtype="<u2"))])], path)
    after, newest = take_fingerprint(build_splits(pinned, 0)), take_fingerprint(build_splits(config, 0))
    assert list_differences(before, after, here="", there="") == []
    assert list_differences(before, newest, here="here", there="there") != []
    assert pin_version(config).version == 2


def test_windows_of_appended_tokens_come_behind_those_that_were_there(token_store):
    path = str(token_store / "store")
    config = StoreConfig(source="store", path=path, sequence=64, vocab=100, validation=0.1, test=0.1, follow=True)
    splits = build_splits(config, seed=0)
    train, count, held_out = splits.train, len(splits.train), len(splits.validation)
    assert growing(train) is train and train.version == 1 and train.newest_version() == 1
    before = train.collate(range(count))
    ids = np.load(token_store / "ids.npy")
    added = np.random.default_rng(1).integers(0, 100, size=9_001).astype("<u2")
    for number, part in enumerate((added[:5_000], added[5_000:]), 2):
        append_store([Table.of([number_column("tokens", part)])], path)
        assert train.newest_version() == number and len(train) == count + (number - 2) * (4_999 // 64)
        digest = train.digest()
        train.grow(number)
        assert train.digest() != digest and train.version == number
        same(train.collate(range(count)), before)
    assert len(train) == count + 9_000 // 64 and len(splits.validation) == held_out
    # No window goes over the place where the appended tokens begin, and each of their tokens is predicted once.
    new = train.collate(range(count, len(train)))
    assert np.array_equal(new.inputs[0].numpy().reshape(-1), added[: 9_000 // 64 * 64])
    assert np.array_equal(new.targets.numpy().reshape(-1), added[1 : 9_000 // 64 * 64 + 1])
    both = train.collate([count, 0, count - 1, len(train) - 1])
    assert np.array_equal(both.inputs[0][1].numpy(), ids[:64]) and torch.equal(both.inputs[0][0], new.inputs[0][0])
    starts = train.block_starts
    assert count in starts and starts[0] == 0 and starts[-1] == len(train) and (np.diff(starts) > 0).all()
    append_store([Table.of([number_column("tokens", np.full(100, 100, "<u2"))])], path)
    with pytest.raises(RunError, match=r"token ids from 0 to 100 .* made for 0 to 99; set data.vocab to 101 or more"):
        train.grow(4)
    assert train.version == 3


def test_a_block_that_goes_under_a_run_is_told_by_name(token_store):
    data = build_splits(StoreConfig(path=str(token_store / "store"), sequence=64), 0)
    assert data.watched is not None and data.watched.find_damage() is None
    path = sorted((token_store / "store" / "blocks").iterdir())[-1]
    os.unlink(path)
    assert path.name in data.watched.find_damage()
    with pytest.raises(RunError, match=path.name):
        for number in range(len(data.train)):
            data.train.collate([number])
    with pytest.raises(RunError, match=f"{path.name}: it is gone"):
        build_splits(StoreConfig(path=str(token_store / "store"), sequence=64), 0)


def test_a_cache_holds_blocks_of_another_machine(monkeypatch):
    build_store([numbers(5000)], "memory://cached/store", options=SMALL)
    config = StoreConfig(path="memory://cached/store", target="label", cache=CacheConfig(memory="8 MiB", policy="lru"))
    plain = config.model_copy(update={"cache": CacheConfig()})
    monkeypatch.setattr("shoal.data.sources.storefile._UNPACKED_BYTES", 1)
    ours, theirs = build_splits(config, 0), build_splits(plain, 0)
    reads = []
    storage = ours.train._data.reader.folder.storage
    original = type(storage).read
    monkeypatch.setattr(type(storage), "read", lambda self, *args: reads.append(args) or original(self, *args))
    order = np.random.default_rng(0).permutation(len(ours.train))[:500]
    found = [ours.train.collate([number]) for number in order]
    # Each block of the training rows once, however often it is asked for.
    assert len(reads) == len(set(reads)) > 10
    for number, items in zip(order, found, strict=True):
        same(items, theirs.train.collate([number]))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "data.target says which column"),
        ({"target": "labl"}, "did you mean 'label'"),
        ({"target": "label", "inputs": ("name",)}, "takes numbers of one shape"),
        ({"target": "label", "inputs": ("gap",)}, "no value in 1 of 20 rows"),
        ({"target": "minus", "inputs": ("label",)}, "classes are numbered from 0"),
        ({"target": "label", "version": 7}, "no version 7"),
        ({"target": "label", "split": "none"}, "no split 'none'"),
        ({"sequence": 64}, "all could be"),
        ({"sequence": 64, "tokens": "label"}, "lower data.sequence"),
        ({"sequence": 4, "tokens": "minus"}, "token ids are 0 or more"),
        ({"sequence": 4, "tokens": "label", "vocab": 3}, "set it to 5 or more"),
        ({"sequence": 4, "target": "label"}, "token ids alone"),
        ({"target": "label", "cache": {"disk": "900 TiB", "path": "."}}, "900 TiB.* is more than the .* that are free"),
        ({"target": "label", "validation": 0.9, "test": 0.05, "inputs": ("weight",)}, None),
    ],
    ids=str,
)
def test_wrong_recipes_are_refused_with_the_fix(tmp_path, settings, words):
    rows = numbers(20)
    valid = np.ones(20, dtype=np.bool_)
    valid[4] = False
    label = number_column("label", np.arange(20) % 5)
    extra = [
        number_column("gap", np.arange(20.0), valid),
        number_column("minus", np.arange(20) - 3),
        make_table(20)["name"],
    ]
    build_store([Table.of([rows["weight"], label, *extra])], str(tmp_path))
    config = StoreConfig(path=str(tmp_path), **settings)
    if words is None:
        assert check_data(config).train == 1
        return
    with pytest.raises(RequestError, match=words):
        check_data(config)


def test_no_store_is_told_with_the_verb_that_makes_one(tmp_path):
    with pytest.raises(RequestError, match="shoal data build"):
        check_data(StoreConfig(path=str(tmp_path / "none"), target="x"))
