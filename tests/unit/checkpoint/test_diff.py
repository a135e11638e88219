"""Two checkpoints compared."""

import math

import torch

from shoal.checkpoint.commit import write_checkpoint
from shoal.checkpoint.diff import compare
from shoal.checkpoint.pieces import as_blob
from shoal.checkpoint.reader import read

torch.set_num_threads(1)


def saved(root, step, tensors, values=None):
    blobs = {name: as_blob(tensor) for name, tensor in tensors.items()}
    return read(write_checkpoint(root, step=step, ranks=[blobs], values=values or {}))


def test_the_same_is_the_same(tmp_path):
    tensors = {"a": torch.tensor([1.0, math.nan, -0.0]), "b": torch.empty(0), "c": torch.tensor(True)}
    difference = compare(saved(tmp_path, 1, tensors, {"x": math.nan}), saved(tmp_path, 2, tensors, {"x": math.nan}))
    assert difference.is_same and difference.num_same == 3 and (difference.first_step, difference.second_step) == (1, 2)


def test_timings_are_told_and_make_no_difference(tmp_path):
    """Two runs from one seed ended with the same weights and were called different, because one had taken longer."""
    values = [{"progress": {"step": 3, "trained_seconds": seconds}} for seconds in (1.5, 2.5)]
    tensors = {"a": torch.ones(2)}
    difference = compare(*(saved(tmp_path, step, tensors, given) for step, given in enumerate(values)))
    assert difference.is_same and difference.timings == ("progress.trained_seconds",) and difference.values == ()
    values[1]["progress"]["step"] = 4
    difference = compare(*(saved(tmp_path, 2 + step, tensors, given) for step, given in enumerate(values)))
    assert not difference.is_same and difference.values == ("progress.step",)


def test_what_differs_is_named_with_its_size(tmp_path):
    first = {
        "same": torch.ones(2),
        "gone": torch.ones(1),
        "moved": torch.tensor([3.0, 4.0, 0.0]),
        "count": torch.tensor(3),
    }
    second = {
        "same": torch.ones(2),
        "new": torch.ones(1),
        "moved": torch.tensor([3.0, 4.5, 0.0]),
        "count": torch.tensor(5),
    }
    difference = compare(
        saved(tmp_path, 1, first, {"p": {"step": 1, "loss": 2.0}, "old": 1}),
        saved(tmp_path, 2, second, {"p": {"step": 2, "loss": 2.0}}),
    )
    assert not difference.is_same
    assert (difference.only_in_first, difference.only_in_second, difference.num_same) == (("gone",), ("new",), 1)
    assert difference.values == ("old", "p.step")
    count, moved = difference.changed
    assert (moved.name, moved.what, moved.num_different, moved.num_elements) == ("moved", "values", 1, 3)
    assert moved.max_abs == 0.5 and moved.relative == 0.1
    assert (count.name, count.max_abs) == ("count", 2.0)


def test_a_bit_that_arithmetic_does_not_see_is_still_a_difference(tmp_path):
    [zero] = compare(
        saved(tmp_path, 1, {"a": torch.tensor([0.0])}), saved(tmp_path, 2, {"a": torch.tensor([-0.0])})
    ).changed
    assert (zero.num_different, zero.max_abs, zero.relative) == (1, 0.0, 0.0)
    [nan] = compare(
        saved(tmp_path, 3, {"a": torch.ones(2)}), saved(tmp_path, 4, {"a": torch.tensor([1.0, math.nan])})
    ).changed
    assert nan.num_different == 1 and math.isnan(nan.max_abs)


def test_other_shapes_and_types_have_no_distance(tmp_path):
    first = {"shape": torch.ones(2, 3), "type": torch.ones(2)}
    second = {"shape": torch.ones(3, 2), "type": torch.ones(2, dtype=torch.bfloat16)}
    shape, kind = compare(saved(tmp_path, 1, first), saved(tmp_path, 2, second)).changed
    assert (shape.what, shape.first, shape.second, shape.max_abs) == ("shape", "float32[2, 3]", "float32[3, 2]", None)
    assert (kind.what, kind.relative) == ("dtype", None)
