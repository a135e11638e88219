"""Fingerprints of data: what two processes compare before they train together."""

import random
import re
import time

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from shoal.core.errors import ShoalError
from shoal.data.build import build_splits
from shoal.data.config import SyntheticConfig, TokensConfig
from shoal.data.fingerprint import (
    Fingerprint,
    chosen_ids,
    differ_in_contents_only,
    list_differences,
    take_fingerprint,
)
from shoal.data.sources.arrays import digest_arrays
from shoal.data.sources.own import from_datasets

torch.set_num_threads(1)


class Rows(Dataset):
    def __init__(self, size=32, width=3, salt=0.0, noise=None, dtype=torch.float32):
        self.size, self.width, self.salt, self.noise, self.dtype = size, width, salt, noise, dtype
        self.read = []

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        self.read.append(i)
        added = self.noise() if self.noise is not None else 0.0
        return torch.full((self.width,), i + self.salt + added, dtype=self.dtype), i % 2


def of(**changed):
    return take_fingerprint(from_datasets(Rows(**changed)))


def differences(ours, theirs):
    return list_differences(ours, theirs, here="here", there="there")


def test_the_same_data_has_the_same_fingerprint():
    assert of() == of() and not differences(of(), of())
    assert Fingerprint.from_values(of().as_values()) == of()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"size": 33}, "the train split has 32 samples here and 33 there"),
        ({"width": 4}, r"has input \(3,\) float32 and target \(\) int64 here and input \(4,\) float32 .* there"),
        ({"dtype": torch.float64}, r"input \(3,\) float32 .* here and input \(3,\) float64 .* there"),
        ({"salt": 1e-6}, "the 32 samples of the train split are not the same here and there"),
    ],
)
def test_other_data_has_another(changed, message):
    assert any(re.search(message, found) for found in differences(of(), of(**changed)))
    assert differ_in_contents_only(of(), of(**changed)) == ("salt" in changed)


def test_every_split_is_looked_at():
    ours = take_fingerprint(from_datasets(Rows(), validation=Rows(), test=Rows()))
    theirs = take_fingerprint(from_datasets(Rows(), validation=Rows(salt=1.0), test=Rows(size=9)))
    found = differences(ours, theirs)
    assert len(found) == 2 and "validation split are not the same" in found[0] + found[1], found


own_generator = np.random.default_rng(3)
NOISES = {
    "torch": lambda: float(torch.rand(())),
    "torch, rarely": lambda: float(torch.rand(()) < 1e-9),
    "numpy": np.random.random,
    "python": random.random,
    "a generator of its own": own_generator.random,
    "a clock": lambda: time.perf_counter_ns() % 1e6,
}


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
def test_samples_with_something_random_are_compared_by_number_only(noise):
    ours = of(noise=noise)
    assert ours.splits["train"].contents == "" and not differences(ours, of())
    assert differences(ours, of(size=31))


def test_no_random_state_moves_and_few_samples_are_read():
    dataset = Rows(size=100_000, noise=NOISES["numpy"])
    data = from_datasets(dataset)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    dataset.read.clear()
    take_fingerprint(data)
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])
    assert dataset.read == [0], "what is drawn once says nothing"
    dataset.noise = None
    take_fingerprint(data)
    assert 99_999 in dataset.read and len(dataset.read) <= 1 + 12


def test_data_that_is_slow_to_read_is_compared_by_number_and_does_not_hold_up_the_start():
    dataset = Rows()
    data = from_datasets(dataset, validation=dataset)
    dataset.read.clear()
    found = take_fingerprint(data, seconds=0.0)
    assert [(split.samples, split.contents) for split in found.splits.values()] == [(32, ""), (32, ""), (0, "")]
    assert not dataset.read


def test_where_time_runs_out_only_the_first_sample_is_read_again():
    """Each rank read 24 samples before every start, and again after every restart."""

    class Slow(Rows):
        def __getitem__(self, i):
            # The sixth read is the last of those that are needed.
            if len(self.read) == 5:
                time.sleep(1.0)
            return super().__getitem__(i)

    dataset = Slow()
    data = from_datasets(dataset)
    dataset.read.clear()
    assert take_fingerprint(data, seconds=1.0) == of()
    assert dataset.read == [0, 0, 0, *chosen_ids(32, 4)[1:]]


def test_chosen_samples_are_within_the_data():
    for size in (1, 2, 3, 5, 1000):
        ids = chosen_ids(size, 4)
        assert ids == sorted(set(ids)) and ids[0] == 0 and ids[-1] == size - 1 and len(ids) <= 4


def test_a_sample_that_cannot_be_read_is_named():
    def fail():
        raise OSError("gone")

    data = from_datasets(TensorDataset(torch.zeros(4, 1), torch.zeros(4, 1)))
    data.train._dataset = Rows(size=4, noise=fail)
    with pytest.raises(ShoalError, match="sample 0 of the train split failed: OSError: gone"):
        take_fingerprint(data)


def test_one_token_in_the_middle_of_a_file_is_seen(tmp_path):
    ids = np.arange(40_000, dtype=np.uint16) % 50
    path = tmp_path / "ids.bin"
    ids.tofile(path)
    config = TokensConfig(path=str(path), sequence=8, vocab=50)
    before = take_fingerprint(build_splits(config, 1))
    assert take_fingerprint(build_splits(config, 1)) == before
    ids[17_001] += 1
    ids.tofile(path)
    assert differ_in_contents_only(before, take_fingerprint(build_splits(config, 1)))


def test_synthetic_data_of_another_seed_is_other_data():
    config = SyntheticConfig(kind="classes", samples=64)
    assert differ_in_contents_only(*(take_fingerprint(build_splits(config, seed)) for seed in (1, 2)))


def test_of_a_huge_array_blocks_all_over_are_hashed(monkeypatch):
    monkeypatch.setattr("shoal.data.sources.arrays._WHOLE_BYTES", 1 << 16)
    monkeypatch.setattr("shoal.data.sources.arrays._BLOCK", 1 << 8)
    monkeypatch.setattr("shoal.data.sources.arrays._NUM_BLOCKS", 16)
    array = np.zeros(1 << 18, dtype=np.uint8)
    found = digest_arrays(array)
    seen = 0
    for place in range(0, len(array), 1 << 12):
        array[place] = 1
        seen += digest_arrays(array) != found
        array[place] = 0
    assert seen >= 16


@pytest.mark.parametrize("values", [None, [], {"train": {}}, {"train": 3}, "text"])
def test_what_is_no_fingerprint_is_refused(values):
    with pytest.raises(ValueError, match="no fingerprint"):
        Fingerprint.from_values(values)
