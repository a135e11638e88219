"""Counting hits."""

from types import SimpleNamespace

import pytest
import torch

from shoal.core.errors import RequestError
from shoal.models.losses import count_correct, flatten_scores, scores_of, with_scores


def test_hits_of_classes() -> None:
    scores = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    assert count_correct(scores, torch.tensor([1, 0, 0])) == (2, 3)


def test_ignored_targets_do_not_count() -> None:
    scores = torch.eye(3)[None]  # (1, 3, 3): position i prefers choice i
    assert count_correct(scores, torch.tensor([[0, -100, 1]])) == (1, 2)
    assert count_correct(scores, torch.full((1, 3), -100)) == (0, 0)


def test_scores_in_dim_one_as_torch_has_them_for_images() -> None:
    scores = torch.zeros(2, 5, 4, 3)
    scores[:, 3] = 1.0
    assert count_correct(scores, torch.full((2, 4, 3), 3)) == (24, 24)


def test_a_regression_has_none() -> None:
    assert count_correct(torch.zeros(3, 1), torch.zeros(3, 1)) is None
    assert count_correct(torch.zeros(3), torch.zeros(3, dtype=torch.int64)) is None
    assert count_correct({"scores": 1}, torch.zeros(3)) is None


def test_shapes_that_do_not_meet_are_refused_with_both() -> None:
    with pytest.raises(RequestError, match=r"puts out \(4, 2\) and the targets are \(3,\)"):
        flatten_scores(torch.zeros(4, 2), torch.zeros(3, dtype=torch.int64))


def test_an_output_object_is_read_by_its_logits() -> None:
    output = SimpleNamespace(logits=torch.eye(3), loss=None)
    assert count_correct(output, torch.tensor([0, 1, 1])) == (2, 3)
    assert scores_of(output) is output.logits
    changed = with_scores(output, torch.zeros(3, 2))
    assert changed.logits.shape == (3, 2) and output.logits.shape == (3, 3)


def test_an_output_without_scores_is_refused_by_its_type() -> None:
    with pytest.raises(RequestError, match=r"puts out a dict, in which no scores are found"):
        scores_of({"hidden": torch.zeros(2)})
