"""The loader of the user's own loop: samplers, weights, streams, tokens; exact positions, on any number of replicas."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from shoal.core.errors import RequestError, RunError
from shoal.data.loading.loader import StepBatch
from shoal.data.loading.steploader import StepLoader
from shoal.data.options import LoaderOptions
from shoal.data.sampling.samplers import draws_alone
from shoal.data.source import Items

torch.set_num_threads(1)
SIZE = 23


class Counted(IterableDataset[Any]):
    """Numbers in their order, from where it was; counts a sample before it is handed out."""

    def __init__(self, size: int = SIZE) -> None:
        self.size, self.place, self.num_read, self.epoch = size, 0, 0, -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        while self.place < self.size:
            number = self.place
            self.place += 1
            self.num_read += 1
            yield torch.tensor([100.0 * self.epoch + number]), number
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "kept": (torch.arange(2), np.int64(3), b"x")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert torch.equal(state["kept"][0], torch.arange(2)) and state["kept"][1:] == (3, b"x")
        self.place = state["place"]


class Behind(Counted):
    """Counts a sample after it was handed out: its state is one sample behind."""

    def __iter__(self) -> Iterator[Any]:
        while self.place < self.size:
            yield torch.tensor([float(self.place)]), self.place
            self.place += 1
        self.place = 0


class Stateless(IterableDataset[Any]):
    """Numbers with noise from the global generator, and no state."""

    def __iter__(self) -> Iterator[Any]:
        for number in range(SIZE):
            yield torch.rand(1) + number, number


class Eager(IterableDataset[Any]):
    """Shuffled by the global generator when it is asked for an iterator, not when it is read; no state."""

    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.tensor([float(number)]), number) for number in torch.randperm(SIZE).tolist()])


def _map() -> TensorDataset:
    return TensorDataset(torch.arange(SIZE).float()[:, None], torch.arange(SIZE))


def _seen(batch: StepBatch) -> list[Any]:
    """What a replica reads in a step: ids, targets and inputs."""
    return [
        (microbatch.sample_ids.tolist(), microbatch.targets.tolist(), microbatch.inputs[0].tolist())
        for microbatch in batch.microbatches
    ]


def _steps(make: Any, count: int, replicas: int, *, after: int = 0, **options: Any) -> list[list[Any]]:
    """The microbatches of all replicas, step by step; ``after`` so many, from a loader's state on new ones."""
    state = None
    if after:
        with StepLoader(make(), global_batch=6, micro_batch=1, seed=3, options=LoaderOptions(**options)) as loader:
            for _ in loader.steps(after):
                state = loader.state_dict()
    found: list[list[Any]] = [[] for _ in range(count - after)]
    for replica in range(replicas):
        with StepLoader(make(), global_batch=6, micro_batch=1, seed=3, options=LoaderOptions(**options)) as loader:
            loader.place(replica=replica, num_replicas=replicas)
            if state is not None:
                loader.load_state_dict(state)
            for step, batch in enumerate(loader.steps(count - after)):
                found[step] += _seen(batch)
    return found


KINDS: list[tuple[str, Any, dict[str, Any]]] = [
    ("shuffled", _map, {}),
    ("sequential", _map, {"shuffle": False}),
    ("drop_last", _map, {"drop_last": True}),
    ("weights", _map, {"weights": [float(i % 3) for i in range(SIZE)], "num_samples": 15}),
    ("once", _map, {"weights": np.arange(SIZE), "num_samples": 15, "replacement": False}),
    ("sampler", _map, {"sampler": SubsetRandomSampler(range(3, 20))}),
    ("replacement", _map, {"sampler": RandomSampler(range(SIZE), replacement=True, num_samples=9)}),
    ("batch_sampler", _map, {"batch_sampler": [[3, 1, 2], [5], [8, 9, 10, 11, 12]]}),
    ("max_tokens", _map, {"max_tokens": 30, "lengths": list(range(1, SIZE + 1))}),
    ("workers", _map, {"num_workers": 2}),
    ("stream", Counted, {}),
    ("stream drop_last", Counted, {"drop_last": True}),
    ("stream even", lambda: Counted(18), {}),
    ("stream behind", Behind, {}),
    ("stream stateless", Stateless, {}),
    ("stream eager", Eager, {}),
    ("stream workers", Counted, {"num_workers": 2}),
]


@pytest.mark.parametrize(("make", "options"), [kind[1:] for kind in KINDS], ids=[kind[0] for kind in KINDS])
def test_every_number_of_replicas_reads_the_same_and_goes_on_exactly(make: Any, options: dict[str, Any]) -> None:
    alone = _steps(make, 9, 1, **options)
    torch.rand(1)  # What a process has drawn before must not matter.
    assert _steps(make, 9, 2, **options) == alone
    assert _steps(make, 9, 3, after=2, **options) == alone[2:], "in the middle of an epoch"
    assert _steps(make, 9, 2, after=4, **options) == alone[4:], "at or near the end of an epoch"


@pytest.mark.parametrize("make", [_map, Counted, lambda: Counted(18), Stateless])
def test_iterating_ends_with_the_epoch_and_every_sample_comes_once_in_each(make: Any) -> None:
    with StepLoader(make(), global_batch=6) as loader:
        for epoch in range(3):
            assert loader.epoch == epoch
            batches = list(loader)
            ids = [int(i) for batch in batches for m in batch.microbatches for i in m.targets]
            assert sorted(ids) == list(range(len(ids))) and len(ids) in (SIZE, 18)
            assert {batch.epoch for batch in batches} == {epoch}
        assert loader.epoch == 3


def test_a_resumed_epoch_is_what_is_left_of_it() -> None:
    with StepLoader(Counted(), global_batch=6) as loader:
        first = [_seen(batch) for batch in itertools.islice(loader, 3)]
        state = loader.state_dict()
    with StepLoader(Counted(), global_batch=6) as loader:
        loader.load_state_dict(state)
        rest = [_seen(batch) for batch in loader]
        assert loader.epoch == 1
    with StepLoader(Counted(), global_batch=6) as loader:
        assert [_seen(batch) for batch in loader] == first + rest


def test_a_dataset_with_state_goes_on_at_once_and_one_without_says_that_it_reads_again() -> None:
    """What was trained on is not read again: 2 x 6 samples of the first three steps, and none of a second pass over them."""
    with StepLoader(Counted(), global_batch=6) as loader:
        state = [loader.state_dict() for _ in loader.steps(3)][-1]
        assert loader.why_slow_to_resume is None
    dataset = Counted()
    with StepLoader(dataset, global_batch=6, options=LoaderOptions(prefetch_factor=0)) as loader:
        loader.load_state_dict(state)
        loader.next()
    assert dataset.num_read == 5, "the last five of 23"
    for make, why in ((Stateless, "Stateless has no state_dict"), (Behind, "does not lead to the sample after them")):
        assert why in str(StepLoader(make(), global_batch=6).why_slow_to_resume)


def test_a_sampler_of_weights_draws_by_its_weights_and_every_process_the_same() -> None:
    weights = [0.0, 1.0, 3.0]
    dataset = TensorDataset(torch.arange(3.0)[:, None], torch.arange(3))
    found = []
    for options in (
        LoaderOptions(weights=weights, num_samples=4000),
        LoaderOptions(sampler=WeightedRandomSampler(weights, 4000)),
    ):
        torch.rand(1)  # What the process has drawn before makes no difference.
        with StepLoader(dataset, global_batch=4000, seed=5, options=options) as loader:
            found.append(loader.next().microbatches[0].targets)
    assert torch.equal(found[0], found[1])
    assert torch.bincount(found[0], minlength=3)[0] == 0
    assert abs(float((found[0] == 2).float().mean()) - 0.75) < 0.03


def test_a_step_has_at_most_so_many_tokens() -> None:
    lengths = [1 + (7 * i) % 11 for i in range(SIZE)]
    options = LoaderOptions(max_tokens=20, lengths=lengths)
    with StepLoader(_map(), global_batch=8, options=options) as loader:
        steps = [[int(i) for m in batch.microbatches for i in m.sample_ids] for batch in loader]
        with pytest.raises(TypeError, match="max_tokens"):
            len(loader)
    assert sorted(i for step in steps for i in step) == list(range(SIZE))
    assert all(sum(lengths[i] for i in step) <= 20 or len(step) == 1 for step in steps)
    assert len({len(step) for step in steps}) > 1


def test_lengths_are_known_where_they_can_be() -> None:
    assert len(StepLoader(_map(), global_batch=6)) == 4
    assert len(StepLoader(_map(), global_batch=6, options=LoaderOptions(drop_last=True))) == 3
    assert len(StepLoader(_map(), global_batch=6, options=LoaderOptions(batch_sampler=[[1], [2, 3]]))) == 2
    with pytest.raises(TypeError, match="without __len__"):
        len(StepLoader(Counted(), global_batch=6))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampler": DistributedSampler(range(SIZE), 2, 0)}, "Shoal deals samples out itself"),
        ({"sampler": [1, 2, 99]}, "yields indices from 1 to 99 and the dataset has 23 samples"),
        ({"batch_sampler": [1, 2]}, "yields int, and must yield lists of indices"),
        ({"weights": [1.0]}, "there are 1 weights and 23 samples"),
        ({"weights": [-1.0] * SIZE}, "must be finite, not negative"),
        ({"weights": [1.0] * SIZE, "shuffle": True}, "leave one of them out"),
        ({"weights": [1.0] * SIZE, "sampler": [1]}, "sampler and weights both say"),
        ({"num_workers": -1}, "num_workers is -1, and must be 0 or more"),
        ({"num_workers": "2"}, "num_workers is '2', and must be 0 or more"),
        ({"max_tokens": 4, "lengths": [1]}, "there are 1 lengths and 23 samples"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        StepLoader(_map(), global_batch=6, options=LoaderOptions(**options)).next()


def test_what_a_stream_cannot_do_is_said() -> None:
    with pytest.raises(RequestError, match="Counted is iterable, so its samples come in its own order, and shuffle"):
        StepLoader(Counted(), global_batch=6, options=LoaderOptions(shuffle=True))
    with pytest.raises(RequestError, match="is a generator, which can be gone through once"):
        StepLoader((sample for sample in Counted()), global_batch=6)
    with pytest.raises(RequestError, match="yields no sample; the training data is empty"):
        StepLoader(Counted(0), global_batch=6)
    with pytest.raises(RunError, match="drop_last leaves out batches below 6; set global_batch to 4"):
        StepLoader(Counted(4), global_batch=6, options=LoaderOptions(drop_last=True)).next()
    loader = StepLoader(Counted(), global_batch=6, seed=1)
    with pytest.raises(RequestError, match="is of seed 2 and this loader has seed 1"):
        loader.load_state_dict({"epoch": 0, "offset": 6, "seed": 2})
    loader.load_state_dict({"epoch": 0, "offset": 66, "seed": 1})
    with pytest.raises(RequestError, match="ended after 23 samples of epoch 0 and the data position is sample 66"):
        loader.next()
    loader.close()


@pytest.mark.parametrize(
    "stream",
    [
        "[" * 9999,
        "[1]",
        '{"of":"dataset","state":{"__shoal__":"tensor","dtype":"nothing","shape":[1],"data":""},"draws":null}',
        '{"of":"dataset","state":{"__shoal__":"tensor","dtype":"int64","shape":[9],"data":""},"draws":null}',
        '{"of":"nobody","state":{},"draws":{"torch":1}}',
    ],
)
def test_a_hostile_state_of_a_stream_is_refused_in_words(stream: str) -> None:
    with StepLoader(Counted(), global_batch=6) as loader:
        loader.load_state_dict({"epoch": 0, "offset": 6, "stream": stream})
        with pytest.raises(RunError, match="the state of a dataset"):
            loader.next()


def test_only_samplers_with_a_generator_of_their_own_are_gone_through_beside_a_model() -> None:
    drawn = torch.Generator()
    assert draws_alone([1, 2]) and draws_alone(RandomSampler(range(4), generator=drawn))
    assert not draws_alone(RandomSampler(range(4))), "it draws from the global generator, which the model's dropout has"


def test_a_dataset_may_say_the_lengths_of_its_samples() -> None:
    dataset = _map()
    dataset.lengths = [10] * SIZE
    with StepLoader(dataset, global_batch=6, options=LoaderOptions(max_tokens=30)) as loader:
        assert loader.next().num_samples == 3


def test_a_collate_function_that_weighs_batches_itself_is_believed() -> None:
    def masked(samples: list[Any]) -> Items:
        rows = torch.stack([sample[0] for sample in samples])
        return Items(inputs=(rows,), targets=rows, weight=sum(1 + sample[1] for sample in samples))

    for dataset in (_map(), Counted()):
        options = LoaderOptions(collate_fn=masked)
        with StepLoader(dataset, global_batch=6, options=options) as loader:
            batch = loader.next()
            expected = sum(1 + int(i) for i in batch.microbatches[0].sample_ids)
            assert batch.total_weight is None and batch.local_weight == expected, "not one for each sample"


def test_the_users_collate_function_and_worker_init_function_are_called() -> None:
    def collate(samples: list[Any]) -> Any:
        return torch.stack([sample[0] for sample in samples]) + OFFSET, torch.tensor([sample[1] for sample in samples])

    for workers in (0, 1):
        options = LoaderOptions(collate_fn=collate, num_workers=workers, worker_init_fn=_set_offset, shuffle=False)
        for dataset in (_map(), Counted()):
            with StepLoader(dataset, global_batch=4, options=options) as loader:
                assert (loader.next().microbatches[0].inputs[0] >= 1000).all() == bool(workers)


OFFSET = 0.0


def _set_offset(worker: int) -> None:
    global OFFSET
    OFFSET = 1000.0
