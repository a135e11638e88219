"""Batches of any form: what datasets give is put together again as it was, and makes the call that people would write."""

import pickle
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shoal.core.errors import RequestError, RunError
from shoal.data.batches.collate import Collator
from shoal.data.batchform import ModelInputs, batch_of, call_model, flat_targets, targets_of
from shoal.data.loading.loader import Loader
from shoal.data.sources.own import from_datasets

one = torch.arange(3.0)


@dataclass
class Point:
    """A sample of a class of the user's own."""

    x: Tensor
    name: str = "p"


class Pair(NamedTuple):
    """A named tuple as inputs."""

    a: Tensor
    b: Tensor


class Asked(nn.Module):
    """Gives back what it was called with."""

    def forward(self, dense: Any = None, sparse: Any = None) -> Any:
        return (dense, sparse)


class Anything(nn.Module):
    """Takes any keyword."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return (args, kwargs)


class OneBatch(nn.Module):
    """Takes the whole batch as one argument."""

    def forward(self, batch: Any) -> Any:
        return batch


def _collate(*samples: Any, **options: Any) -> Any:
    return Collator(uniform_weight=options.pop("uniform_weight", 1), **options).collate(samples)


def test_plain_samples_have_no_form() -> None:
    for sample in ((one, 1), ((one, one), 1.0), [one, np.float32(2)]):
        items = _collate(sample, sample)
        assert items.form is None and isinstance(items.targets, Tensor) and items.inputs[0].shape == (2, 3)


def test_dict_inputs_become_keywords_where_the_forward_pass_takes_them() -> None:
    items = _collate(({"dense": one, "sparse": [1, 2]}, 0), ({"dense": one + 1, "sparse": [3, 4]}, 1))
    dense, sparse = call_model(Asked(), items.model_inputs)
    assert torch.equal(dense, torch.stack([one, one + 1])) and [part.tolist() for part in sparse] == [[1, 3], [2, 4]]
    assert isinstance(items.targets, Tensor) and items.targets.tolist() == [0, 1]
    whole = call_model(OneBatch(), items.model_inputs)
    assert set(whole) == {"dense", "sparse"} and torch.equal(whole["dense"], dense)
    args, kwargs = call_model(Anything(), items.model_inputs)
    assert args == () and set(kwargs) == {"dense", "sparse"}


def test_a_key_that_the_forward_pass_does_not_take_is_refused_by_name_unless_the_loss_may_read_it() -> None:
    pair = _collate(({"dense": one, "spars": one}, 0))
    with pytest.raises(TypeError, match="spars"):
        call_model(Asked(), pair.model_inputs)
    alone = _collate({"dense": one, "label": 1})
    assert call_model(Asked(), alone.model_inputs)[1] is None and alone.form.unread(Asked()) == ("label",)
    assert targets_of(alone.form, alone.inputs, alone.targets)["label"].tolist() == [1]


def test_targets_and_batches_have_the_form_of_the_dataset() -> None:
    items = _collate(
        ((one, Pair(one, one)), {"click": 1.0, "rest": (1, 2)}), ((one, Pair(one, one)), {"click": 0.0, "rest": (3, 4)})
    )
    wanted = targets_of(items.form, items.inputs, items.targets)
    assert wanted["click"].tolist() == [1.0, 0.0] and [part.tolist() for part in wanted["rest"]] == [[1, 3], [2, 4]]
    (first, second), again = batch_of(items.form, items.inputs, items.targets)
    assert torch.equal(first, torch.stack([one, one])) and isinstance(second, Pair) and set(again) == {"click", "rest"}
    assert len(flat_targets(items.targets)) == 3


def test_dataclasses_come_back_as_themselves() -> None:
    items = _collate((Point(one), one), (Point(one, "q"), one))
    found = call_model(OneBatch(), items.model_inputs)
    assert isinstance(found, Point) and found.name == ["p", "q"] and found.x.shape == (2, 3)


def test_forms_are_equal_where_structures_are_and_survive_being_sent() -> None:
    one_form, other = (_collate({"x": one + value, "labels": value}).form for value in (1, 2))
    assert one_form == other and hash(one_form) == hash(other) and pickle.loads(pickle.dumps(one_form)) == other
    assert one_form != _collate({"y": one, "labels": 1}).form
    inputs = ModelInputs([one], one_form)
    assert inputs.map(lambda tensor: tensor + 1).form == one_form


def test_texts_in_samples_make_no_other_form() -> None:
    train, held_out = ([{"x": one, "labels": 1, "text": text}] for text in ("one", "another"))
    from_datasets(train, held_out)
    with pytest.raises(RequestError, match="the validation split has another form"):
        from_datasets(train, [{"x": one, "labels": 1, "words": "one"}])


def test_a_forward_pass_that_takes_no_name_is_given_the_whole_dict() -> None:
    class Unnamed(nn.Module):
        def forward(self, *batches: Any) -> Any:
            return batches

    assert list(call_model(Unnamed(), _collate({"x": one, "labels": 1}).model_inputs)[0]) == ["x", "labels"]


def test_labels_of_a_dict_are_counted() -> None:
    samples = [
        {"input_ids": torch.arange(4), "labels": torch.tensor(row)} for row in ([5, 1, 2, -100], [-100, -100, 3, 4])
    ]
    assert _collate(*samples, uniform_weight=None).weight == 5
    assert _collate(*samples, uniform_weight=None, first_label_counts=False).weight == 4


def test_a_collate_function_of_the_users_own() -> None:
    def pad(samples: list[list[int]]) -> dict[str, Any]:
        longest = max(map(len, samples))
        rows = torch.tensor([row + [0] * (longest - len(row)) for row in samples])
        return {"input_ids": rows, "labels": rows, "note": "padded"}

    data = from_datasets([[1, 2], [1], [1, 2, 3]], collate_fn=pad)
    items = data.train.collate([1, 2])
    assert items.inputs[0].tolist() == [[1, 0, 0], [1, 2, 3]] and items.weight == 6
    assert batch_of(items.form, items.inputs, items.targets)["note"] == "padded"
    with pytest.raises(
        RequestError, match=r"the collate function .*<lambda> returned a str.*return \(inputs, targets\)"
    ):
        from_datasets([1, 2], collate_fn=lambda samples: "text")
    with pytest.raises(RunError, match=r"collate function .* failed on 2 sample\(s\): ZeroDivisionError"):
        _collate(1, 2, collate_fn=lambda samples: 1 // 0)


def test_loader_processes_hand_forms_over() -> None:
    data = from_datasets([{"x": one + number, "y": {"a": number, "b": (one, 1.0)}} for number in range(8)])
    pairs = from_datasets([(one + number, {"a": number, "b": one}) for number in range(8)])
    with ExitStack() as opened:
        here, there = (
            opened.enter_context(closing(Loader(data.train, global_batch=4, micro_batch=2, workers=workers)))
            for workers in (0, 1)
        )
        for _ in range(2):
            for own, shared in zip(here.next().microbatches, there.next().microbatches, strict=True):
                assert own.form == shared.form and own.targets == () == shared.targets
                assert all(torch.equal(a, b) for a, b in zip(own.inputs, shared.inputs, strict=True))
        loader = opened.enter_context(closing(Loader(pairs.train, global_batch=4, micro_batch=4, workers=1)))
        shared = loader.next().microbatches[0]
        assert targets_of(shared.form, shared.inputs, shared.targets)["b"].shape == (4, 3)


def test_samples_of_different_forms_are_named() -> None:
    with pytest.raises(RunError, match=r"one shape, and sample 0 has \{'a': .* sample 1 has \{'b': .*collate_fn"):
        _collate({"a": one}, {"b": one})
    with pytest.raises(RunError, match="sample 1: its value of 'a' is a object"):
        _collate({"a": one}, {"a": object()})


def test_inputs_have_names_and_are_the_same_without_labels() -> None:
    form = Collator(uniform_weight=1).collate([{"dense": one, "sparse": {"a": one}, "labels": torch.tensor(1)}])
    whole = form.model_inputs
    bare = whole.without_labels()
    assert whole.names(Asked()) == ["dense", "sparse.a", "labels"] and bare.names(Asked()) == ["dense", "sparse.a"]
    dense, sparse = call_model(Asked(), bare)
    assert torch.equal(dense[0], one) and torch.equal(sparse["a"][0], one)
    assert bare.without_labels() is bare, "there are none"
    assert ModelInputs([one, one, one]).names(Asked()) == ["dense", "sparse", "input_2"]
