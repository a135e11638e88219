"""Evaluations of iterable datasets: each sample once, as many as there are or as were asked for, and the stream is left alone."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import shoal
from shoal.data.config import OwnDataConfig
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
