"""Evaluations of iterable datasets: each sample once, as many as there are or as were asked for, and the stream is left alone."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import shoal
from shoal.core.errors import RequestError
from shoal.data.config import OwnDataConfig
from shoal.data.loading.steploader import StepLoader
from shoal.data.sources.own import build_own


class Stream(IterableDataset):
    def __init__(self, count=None, start=0):
        self.count, self.start, self.read = count, start, 0

    def __iter__(self):
        numbers = itertools.count() if self.count is None else range(self.count)
        for number in numbers:
            self.read += 1
            drawn = torch.Generator().manual_seed(self.start + number)
            yield torch.randn(4, generator=drawn), number % 3


def streams():
    return {"train": Stream(32), "validation": Stream(37, start=100)}


def mixed():
    return {"train": list(Stream(32)), "validation": Stream(37, start=100)}


def evaluated(held_out, **options):
    with shoal.Run(seed=0) as run:
        model = nn.Linear(4, 3)
        run.loader(list(Stream(16)), global_batch=8)
        run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=nn.CrossEntropyLoss())
        return [run.evaluate(held_out, **options) for _ in range(2)]


@pytest.mark.parametrize("limit", [0, 20, 1000])
def test_a_stream_is_evaluated_as_the_list_of_its_samples_is(limit):
    stream = Stream(37)
    found, again = evaluated(stream, limit=limit, batch=8)
    expected, _ = evaluated(list(Stream(37)), limit=limit, batch=8)
    assert (found.loss, found.samples) == (expected.loss, expected.samples) == (again.loss, again.samples)
    assert found.samples == min(limit or 37, 37) and stream.read == 0


def test_an_endless_stream_is_read_as_far_as_was_asked():
    found, _ = evaluated(Stream(), limit=50, batch=8)
    expected, _ = evaluated(list(Stream(50)), batch=8)
    assert (found.loss, found.samples) == (expected.loss, 50)


@pytest.mark.parametrize("name", ["streams", "mixed"])
def test_a_recipe_may_hold_out_a_stream(name):
    splits = build_own(OwnDataConfig(build=f"{__name__}:{name}"), seed=0)
    assert splits.validation.count(10**6) == 37 and splits.validation.count(5) == 5 and len(splits.test) == 0
    both = splits.validation.collate([0, 36])
    assert torch.equal(
        both.inputs[0], torch.stack([sample for number, (sample, _) in enumerate(Stream(37, 100)) if number in (0, 36)])
    )


class Told(Stream):
    """One that says where it is."""

    def __init__(self, count=None, start=0):
        super().__init__(count, start)
        self.place = 0

    def __iter__(self):
        while self.place < self.count:
            self.place += 1
            drawn = torch.Generator().manual_seed(self.start + self.place - 1)
            yield torch.randn(4, generator=drawn), (self.place - 1) % 3
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class Shuffled(Stream):
    def set_epoch(self, epoch):
        self.start = epoch


class Dealt(Stream):
    def shard(self, replica, num_replicas):
        return self


def stream_of(kind, count):
    return {"plain": Stream, "told": Told, "shuffled": Shuffled, "dealt": Dealt}[kind](count)


def hold_out(kind, count=20, first=6):
    config = OwnDataConfig(build=f"{__name__}:stream_of", args={"kind": kind, "count": count}, hold_out=first)
    return build_own(config, seed=0)


@pytest.mark.parametrize("kind", ["plain", "told"])
def test_the_first_samples_of_a_stream_are_held_out_in_every_epoch_and_after_a_resume(kind):
    splits, rows = hold_out(kind), [row for row, _ in Stream(20)]
    assert torch.equal(splits.validation.collate(range(6)).inputs[0], torch.stack(rows[:6]))

    def read(loader, steps):
        return [row for batch in loader.steps(steps) for one in batch.microbatches for row in one.inputs[0]]

    with StepLoader(hold_out(kind), global_batch=4) as loader:
        found = read(loader, 2)
        state = loader.state_dict()
    with StepLoader(hold_out(kind), global_batch=4) as loader:
        loader.load_state_dict(state)
        found += read(loader, 6)
    assert len(found) == 28 and torch.equal(torch.stack(found), torch.stack([*rows[6:], *rows[6:]]))


@pytest.mark.parametrize(
    ("kind", "count", "words"),
    [
        ("plain", 6, "data.hold_out 6 leaves nothing for training: Stream yields 6 samples"),
        ("shuffled", 20, "begins with other samples in its second epoch"),
        ("dealt", 20, "Dealt shards itself"),
    ],
)
def test_a_stream_whose_first_samples_cannot_be_held_out_is_refused(kind, count, words):
    with pytest.raises(RequestError, match=words):
        hold_out(kind, count)


def test_only_a_stream_without_a_validation_split_has_its_first_samples_held_out():
    with pytest.raises(RequestError, match=r"returned a validation split too"):
        build_own(OwnDataConfig(build=f"{__name__}:streams", hold_out=4), seed=0)
    with pytest.raises(RequestError, match=r"returned a validation split too|map-style"):
        build_own(OwnDataConfig(build=f"{__name__}:mixed", hold_out=4), seed=0)
