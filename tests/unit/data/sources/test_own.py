"""The user's own datasets."""

from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.core.errors import RequestError, RunError
from shoal.data.build import build_splits
from shoal.data.check import check_data
from shoal.data.config import OwnDataConfig
from shoal.data.fingerprint import take_fingerprint
from shoal.data.loading.parts import Part
from shoal.data.loading.workers import LoaderProcesses, WorkerOptions
from shoal.data.order import Position
from shoal.data.sources.own import DatasetSource

torch.set_num_threads(1)

MODULE = """
import random
import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

class Points(Dataset):
    classes = ["red", "green"]
    def __init__(self, size): self.size = size
    def __len__(self): return self.size
    def __getitem__(self, i): return torch.full((3,), float(i)), i % 2

class Stream(IterableDataset):
    def __iter__(self): return iter([])

class Sums(Dataset):
    def __len__(self): return 6
    def __getitem__(self, i): return (torch.ones(2), torch.zeros(1)), torch.tensor([float(i)])

class Tokens(Dataset):
    vocab = 9
    def __len__(self): return 4
    def __getitem__(self, i): return torch.arange(5), torch.tensor([1, 2, 3, 4, -100])

def points(size=10): return Points(size)
def named(): return {"train": Points(5), "validation": Points(3)}
def misnamed(): return {"train": Points(5), "valid": Points(3)}
def stream(): return Stream()
def sums(): return Sums()
def tokens(): return Tokens()
def number(): return 3
class Listed(Dataset):
    def __init__(self, samples): self.samples = samples
    def __len__(self): return len(self.samples)
    def __getitem__(self, i): return self.samples[i]

one = torch.zeros(3)
def dict_input(): return Listed([({"ids": one, "mask": one}, 1)] * 9)
def dict_among_inputs(): return Listed([((one, {"ids": one}), 1)] * 9)
def dict_target(): return Listed([(one, {"boxes": one})] * 9)
def two_targets(): return Listed([(one, (one, one))] * 9)
def list_target(): return Listed([(one, [1.0, 2.0])] * 9)
def text_input(): return Listed([("a sentence", 1)] * 9)
def dict_sample(): return Listed([{"x": one, "y": 1}] * 9)
def odd_validation(): return {"train": Points(5), "validation": dict_target()}
def unlabelled_test(): return {"train": Points(5), "test": Listed([(one, None)] * 3)}
def ragged(): return {"train": Listed([(torch.zeros(3 + i % 2), i) for i in range(9)])}
def odd_later(): return {"train": Listed([(one, 1)] * 5 + [(one, {"a": one})])}
class Torn(Points):
    def __getitem__(self, i): return super().__getitem__(i) if i < 3 else {}["gone"]
def torn(): return {"train": Torn(5)}
def made_up():
    drawn = torch.randn(8, 3) + torch.from_numpy(np.random.rand(8, 3)) + random.random()
    return {"train": TensorDataset(drawn, torch.zeros(8))}
class Records(Points):
    def __getitem__(self, i):
        if i == 33: raise ValueError("corrupt")
        return (torch.zeros(4 if i == 34 else 3), torch.tensor([0.0]))
def cut(): return Records(60)
def negative(): return Points(-1)
def text_long(): return Points("many")
def part_negative(): return {"train": Points(5), "test": Points(-1)}
def triples(): return TensorDataset(torch.zeros(9), torch.zeros(9), torch.zeros(9))
"""


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_data.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def _config(name: str, **values: object) -> OwnDataConfig:
    return OwnDataConfig.model_validate({"build": f"own_data:{name}", **values})


def test_one_dataset_is_cut_by_the_shares() -> None:
    splits = build_splits(_config("points", args={"size": 20}, validation=0.2, test=0.1), 0)
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [14, 4, 2]
    parts = [part.collate(range(len(part))) for part in (splits.train, splits.validation, splits.test)]
    seen = [int(row[0]) for part in parts for row in part.inputs[0]]
    assert sorted(seen) == list(range(20)), "every sample is in exactly one split"
    assert seen != list(range(20)), "a sorted dataset is not cut into its head and its tail"
    again = build_splits(_config("points", args={"size": 20}, validation=0.2, test=0.1), 7)
    assert torch.equal(again.train.collate([0]).inputs[0], splits.train.collate([0]).inputs[0]), "whatever the seed"
    assert (splits.spec.kind, splits.spec.features, splits.spec.classes) == ("own", (3,), 2)


def test_named_datasets_are_taken_as_they_are() -> None:
    splits = build_splits(_config("named"), 0)
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [5, 3, 0]


def test_a_test_split_without_labels_is_none_of_trainings_business() -> None:
    splits = build_splits(_config("unlabelled_test"), 0)
    found = take_fingerprint(splits).splits["test"]
    assert (len(splits.test), found.samples, found.contents) == (3, 3, "")
    with pytest.raises(RunError, match="sample 0 of the test split: its target is a NoneType"):
        splits.test.collate([0])


def test_several_inputs_and_float_targets() -> None:
    splits = build_splits(_config("sums", validation=0, test=0), 0)
    items = splits.train.collate([4, 5, 0, 1, 2, 3])
    assert [tuple(tensor.shape) for tensor in items.inputs] == [(6, 2), (6, 1)]
    assert sorted(items.targets.flatten().tolist()) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert items.weight == 6 and splits.train.uniform_weight == 1
    assert splits.spec.outputs == 1


def test_ignored_targets_have_no_weight() -> None:
    splits = build_splits(_config("tokens", validation=0, test=0), 0)
    assert splits.train.uniform_weight is None
    assert splits.train.collate([0, 1]).weight == 8
    assert (splits.spec.vocab, splits.spec.sequence, splits.spec.tokens_per_sample) == (9, 5, 5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("misnamed", "a dict of 'train', 'valid'; its keys are"),
        ("stream", "Stream yields no sample; the training data is empty"),
        ("number", "returned a int, which is no map-style dataset"),
        (
            "triples",
            r"first sample of the train split \(sample \d+ of the dataset\): a sample is a tuple of 3: Tensor, Tensor, Tensor; "
            r"return \(inputs, targets\)",
        ),
        ("text_input", "its input is a str"),
        ("odd_validation", "the validation split has another form than that of the train split: .*{'boxes': "),
        ("negative", r"the length of its Points failed: ValueError: __len__\(\) should return >= 0"),
        ("text_long", "the length of its Points failed: TypeError"),
        ("part_negative", "the length of its Points failed"),
    ],
)
def test_what_is_no_dataset_is_refused(name: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        build_splits(_config(name), 0)


def test_the_name_and_the_arguments_are_checked_before_anything_is_built() -> None:
    summary = check_data(_config("points"))
    assert summary.spec is None and summary.train is None
    with pytest.raises(RequestError, match=r"data\.build = 'own_data:pionts'.*did you mean 'points'"):
        check_data(_config("pionts"))
    with pytest.raises(RequestError, match="unexpected keyword argument 'sise'"):
        check_data(_config("points", args={"sise": 3}))


def test_too_few_samples_for_the_splits_are_refused() -> None:
    with pytest.raises(RequestError, match="has 2 samples and each split needs 1: 3 splits need at least 3"):
        build_splits(_config("points", args={"size": 2}), 0)


@pytest.mark.parametrize(
    ("name", "ids", "message"),
    [
        (
            "ragged",
            [2, 4, 5],
            r"sample 2 of the train split has input \(3,\) float32 .*, sample 5 of the train split has input \(4,\) float32",
        ),
        (
            "odd_later",
            [1, 5],
            "one shape, and sample 1 of the train split has .* sample 5 of the train split has .*{'a': ",
        ),
        ("torn", [0, 4], r"^reading sample 4 of the train split failed: KeyError: 'gone' \(.*own_data.py:\d+\)"),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_samples_that_cannot_be_stacked_are_named(name: str, ids: list[int], message: str, workers: int) -> None:
    """Raw errors of torch said neither which sample nor what it was, and a loader process put its traceback into the message."""
    source = build_splits(_config(name), 0).train
    part = Part(microbatches=[np.array(ids)], num_samples=len(ids), position=Position())
    options = WorkerOptions(num_workers=1, prefetch=1, deadline_s=60.0, seed=1)
    loaded = LoaderProcesses.of_source(source, iter([part]), options) if workers else None
    try:
        with pytest.raises(RunError, match=message) as found:
            loaded.next() if loaded is not None else source.collate(ids)
    finally:
        if loaded is not None:
            loaded.close()
    assert "Traceback" not in str(found.value)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (33, r"^reading sample 33 of the dataset failed: ValueError: corrupt \(.*own_data.py:\d+\)"),
        (34, r"sample 34 of the dataset has input \(4,\) float32"),
    ],
)
def test_a_sample_of_a_split_is_named_by_its_index_in_the_dataset(index: int, message: str) -> None:
    """The number was that after the shuffle and the cut, at which the user's dataset has another sample."""
    source = build_splits(_config("cut", validation=0, test=0), 0).train
    assert isinstance(source, DatasetSource)
    order = {source.name_sample(number): number for number in range(len(source))}
    ids = [order[f"sample {each} of the dataset"] for each in (1, index, 2)]
    assert ids[1] != index
    with pytest.raises(RunError, match=message):
        source.collate(ids)


def test_data_that_is_made_up_of_random_numbers_is_the_same_everywhere() -> None:
    """Each rank had its own: nothing but the loss of another run could have shown it."""
    state = torch.get_rng_state()
    first, second, other = (
        build_splits(_config("made_up"), seed).train.collate(range(8)).inputs[0] for seed in (1, 1, 2)
    )
    assert torch.equal(first, second) and not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)
