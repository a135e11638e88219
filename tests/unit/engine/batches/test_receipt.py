"""A rank's count of an epoch: with real batches of a real loader, resumed anywhere, under orders with and without once each."""

from dataclasses import replace

import numpy as np
import pytest
from torch.utils.data import IterableDataset

from shoal.comm.world import join_world
from shoal.core.errors import RunError
from shoal.core.place import Place
from shoal.data.loading.loader import Loader
from shoal.data.options import LoaderOptions
from shoal.data.order import Position
from shoal.data.sources.anyset import splits_of
from shoal.data.sources.arrays import ArraySource
from shoal.engine.batches.receipt import ReceiptCounter, why_no_receipt

SAMPLES, BATCH = 23, 4


@pytest.fixture
def world():
    return join_world(Place(), deadline_seconds=10.0)


def source_of(**options):
    source = ArraySource(
        (np.zeros((SAMPLES, 2), np.float32),), np.zeros(SAMPLES, np.int64), rows=range(SAMPLES), uniform_weight=1
    )
    source.options = LoaderOptions(**options)
    return source


def counter_of(source, world, events=None, **options):
    return ReceiptCounter(
        source,
        world=world,
        replica=0,
        seed=3,
        report=(lambda event: None) if events is None else events.append,
        **options,
    )


def batches_of(source, steps, *, position=None, batch=BATCH):
    loader = Loader(source, global_batch=batch, micro_batch=2, seed=3, position=position, prefetch=0)
    try:
        return [loader.next() for _ in range(steps)]
    finally:
        loader.close()


def train(counter, batches):
    for batch in batches:
        counter.before_step(batch)
        counter.after_step(batch)


def without_one(batch):
    first, *rest = batch.microbatches
    return replace(batch, microbatches=(replace(first, sample_ids=first.sample_ids[1:]), *rest))


def with_a_repeated_one(batch):
    first, *rest = batch.microbatches
    ids = first.sample_ids.copy()
    ids[0] = ids[1]
    return replace(batch, microbatches=(replace(first, sample_ids=ids), *rest))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": False},
        {"drop_last": True},
        {"order": "window", "window": 1},
        {"order": "time"},
        {"max_tokens": 7},
        {"replay": 0.25},
        {"replay": 0.4, "replay_last": 5, "drop_last": True},
        {"replay": 0.3, "replay_from": [4, "10:13"]},
    ],
)
@pytest.mark.parametrize("each_step", [False, True])
def test_epochs_are_proved(world, options, each_step):
    if "max_tokens" in options:
        options = {**options, "lengths": [1 + number % 4 for number in range(SAMPLES)]}
    source, events = source_of(**options), []
    counter = counter_of(source, world, events, each_step=lambda: each_step)
    train(counter, batches_of(source, 30))
    assert len(events) >= 2 and all(event.ok for event in events)
    assert [event.epoch for event in events] == list(range(len(events))) and counter.state.proved == len(events)
    if not options.get("drop_last"):
        assert {event.rows - event.replayed for event in events} == {SAMPLES}
    assert all(bool(event.replayed) == ("replay" in options) for event in events)
    if "replay" not in options:
        assert {event.rows for event in events} == {20 if options.get("drop_last") else SAMPLES}


@pytest.mark.parametrize("wrong", [without_one, with_a_repeated_one])
@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"order": "window", "window": 1}])
@pytest.mark.parametrize("place", [0, 3, 4])
def test_a_lost_or_repeated_sample_ends_the_run(world, wrong, options, place):
    source, events = source_of(**options), []
    batches = batches_of(source, 6)
    batches[place] = wrong(batches[place])
    with pytest.raises(RunError, match="epoch 0 trained on"):
        train(counter_of(source, world, events), batches)
    assert [event.ok for event in events] == [False]


@pytest.mark.parametrize("stop", [0, 1, 3, 5, 6, 8])
def test_a_run_that_goes_on_proves_its_epoch_and_one_that_forgets_does_not(world, stop):
    source, events = source_of(), []
    before = counter_of(source, world)
    batches = batches_of(source, 12)
    train(before, batches[:stop])
    kept, position = before.agree(), batches[stop - 1].position if stop else Position()
    # On another size of batch too: only the position counts.
    rest = batches_of(source, 30, position=position, batch=5)
    after = counter_of(source, world, events)
    assert after.take_up(kept, position) is None
    train(after, rest)
    assert events and all(event.ok for event in events)
    if position.offset:
        forgetful = counter_of(source, world)
        forgetful.take_up(replace(kept, rows=0, total=0), position)
        with pytest.raises(RunError, match=f"trained on {SAMPLES - position.offset} samples"):
            train(forgetful, rest)


def test_saving_in_the_middle_of_an_epoch_changes_nothing(world):
    source, events = source_of(), []
    counter = counter_of(source, world, events)
    for batch in batches_of(source, 18):
        counter.before_step(batch)
        counter.after_step(batch)
        counter.agree()
    assert [event.ok for event in events] == [True] * 3


def test_a_step_that_was_announced_and_never_taken_does_not_count(world):
    source, events = source_of(), []
    counter = counter_of(source, world, events, each_step=lambda: True)
    batches = batches_of(source, 6)
    for batch in batches:
        counter.before_step(batch)  # the step fails, and is done again
        counter.before_step(batch)
        counter.after_step(batch)
    assert [event.ok for event in events] == [True]


def test_what_has_no_once_each_says_why(world):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([(np.zeros(2, np.float32), 0)] * 5)

    stream = splits_of(Stream(), LoaderOptions(), seed=0).train
    assert "a stream has the samples that it yields" in why_no_receipt(stream)
    source, events = source_of(weights=[1.0] * SAMPLES), []
    counter = counter_of(source, world, events)
    train(counter, batches_of(source, 12))
    assert [(event.ok, event.epoch) for event in events] == [(None, 0), (None, 1)]
    assert "drawn with weights" in events[0].reason and counter.agree() is None
    assert "sampler" in why_no_receipt(source_of(sampler=list(range(SAMPLES))))


def test_an_epoch_that_cannot_be_proved_is_told_of_and_the_next_one_is_proved(world):
    source, events = source_of(), []
    batches = batches_of(source, 12)
    counter = counter_of(source, world, events)
    said = counter.take_up(None, batches[1].position)
    assert "epoch 0 will have no receipt: the run went on in the middle of an epoch" in said
    train(counter, batches[2:])
    assert [event.ok for event in events] == [None, True]
