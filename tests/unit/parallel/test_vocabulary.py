"""The split loss on one process: ranks are threads that meet in a channel of their own."""

import threading

import pytest
import torch
from torch import nn

from shoal.comm.channel import Channel
from shoal.comm.trafficcounter import TrafficCounter
from shoal.core.errors import RequestError
from shoal.models.losses import count_correct, cross_entropy
from shoal.parallel.tensor.vocabulary import (
    apply_split_embedding,
    gather_logits,
    place_rows,
    rows_per_rank,
    split_count_correct,
    split_cross_entropy,
)


class Meeting:
    """A transport whose ranks are threads."""

    def __init__(self, size):
        self.size, self.parts = size, [None] * size
        self.barrier = threading.Barrier(size, timeout=20)

    def channel(self, rank):
        return Channel("tp", rank=rank, size=self.size, transport=_Seat(self, rank), traffic=TrafficCounter())


class _Seat:
    def __init__(self, meeting, rank):
        self.meeting, self.rank = meeting, rank

    def all_gather(self, own, whole, counts):
        self.meeting.parts[self.rank] = own.clone()
        self.meeting.barrier.wait()
        whole.copy_(torch.cat(self.meeting.parts))
        self.meeting.barrier.wait()


def on_ranks(size, function):
    """What ``function(channel)`` gives on every rank."""
    meeting, results, errors = Meeting(size), [None] * size, []

    def run(rank):
        try:
            results[rank] = function(meeting.channel(rank))
        except Exception as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    return results


def stretch(scores, channel):
    """A rank's stretch of whole scores; padding is filled with what would win if it counted."""
    rows = rows_per_rank(scores.shape[-1], channel.size)
    padded = torch.full((*scores.shape[:-1], rows * channel.size), 100.0, dtype=scores.dtype)
    padded[..., : scores.shape[-1]] = scores
    return padded[..., channel.rank * rows : (channel.rank + 1) * rows].clone()


def example(vocab, dtype=torch.float64):
    generator = torch.Generator().manual_seed(vocab)
    scores = 5 * torch.randn(3, 4, vocab, generator=generator, dtype=torch.float64)
    targets = torch.randint(vocab, (3, 4), generator=generator)
    targets[0, 0], targets[1, 1] = -100, vocab - 1
    return scores.to(dtype), targets


@pytest.mark.parametrize(("vocab", "degree"), [(8, 2), (65, 2), (67, 4), (5, 4), (3, 2)])
def test_loss_and_gradient_are_those_of_whole_scores(vocab, degree):
    scores, targets = example(vocab)
    whole = scores.clone().requires_grad_()
    expected = cross_entropy(whole, targets)
    expected.backward()

    def run(channel):
        local = stretch(scores, channel).requires_grad_()
        loss = split_cross_entropy(local, targets, channel=channel, vocab=vocab)
        loss.backward()
        return loss.detach(), local.grad

    results = on_ranks(degree, run)
    for loss, _ in results:
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-14, atol=1e-14)
    gradient = torch.cat([grad for _, grad in results], dim=-1)
    torch.testing.assert_close(gradient[..., :vocab], whole.grad, rtol=1e-13, atol=1e-15)
    assert not gradient[..., vocab:].any()


def test_all_ignored_is_zero_with_a_gradient_of_zeros():
    def run(channel):
        local = torch.randn(2, 4).requires_grad_()
        loss = split_cross_entropy(local, torch.tensor([-100, -100]), channel=channel, vocab=8)
        loss.backward()
        return loss.item(), bool(local.grad.any())

    assert on_ranks(2, run) == [(0.0, False)] * 2


def test_half_types_accumulate_in_float32():
    scores, targets = example(65, torch.bfloat16)

    def run(channel):
        return split_cross_entropy(stretch(scores, channel), targets, channel=channel, vocab=65)

    for loss in on_ranks(2, run):
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, cross_entropy(scores, targets), rtol=1e-6, atol=1e-6)


def test_stretch_of_minus_infinity_is_no_nan():
    scores, targets = example(8)
    scores[..., :4] = -torch.inf
    targets = targets.clamp(min=4)

    def run(channel):
        return split_cross_entropy(stretch(scores, channel), targets, channel=channel, vocab=8)

    for loss in on_ranks(2, run):
        torch.testing.assert_close(loss, cross_entropy(scores, targets))


def test_target_outside_the_vocabulary_is_an_error():
    def run(channel):
        return split_cross_entropy(torch.zeros(1, 4), torch.tensor([7]), channel=channel, vocab=7)

    with pytest.raises(IndexError, match="vocabulary of 7"):
        on_ranks(2, run)


def test_scores_in_another_dim_are_refused():
    def run(channel):
        return split_cross_entropy(torch.zeros(2, 4, 3), torch.zeros(2, 3, dtype=torch.long), channel=channel, vocab=8)

    with pytest.raises(RequestError, match=r"\(2, 4, 3\)"):
        on_ranks(2, run)


def test_count_of_hits_takes_the_first_of_equal_scores_and_no_padding():
    scores, targets = example(67)
    scores[0, 1, 3], scores[0, 1, 60], targets[0, 1] = 50.0, 50.0, 3
    found = on_ranks(
        4, lambda channel: split_count_correct(stretch(scores, channel), targets, channel=channel, vocab=67)
    )
    assert found == [count_correct(scores, targets)] * 4
    assert found[0].correct >= 1


def test_gathered_scores_have_no_padding_and_the_gradient_of_each_rank():
    scores, targets = example(67)

    def run(channel):
        local = stretch(scores, channel).requires_grad_()
        whole = gather_logits(local, channel, 67)
        cross_entropy(whole, targets).backward()
        return whole.detach(), local.grad

    plain = scores.clone().requires_grad_()
    cross_entropy(plain, targets).backward()
    results = on_ranks(4, run)
    assert all(torch.equal(whole, scores) for whole, _ in results)
    assert torch.equal(torch.cat([grad for _, grad in results], dim=-1)[..., :67], plain.grad)


def test_a_rank_may_hold_nothing_but_padding():
    assert place_rows((5, 3), degree=4, rank=3).patches == ()
    assert place_rows((5, 3), degree=4, rank=2).patches[0].shape == (1, 3)


def test_a_token_outside_the_vocabulary_is_refused_as_torch_does():
    """No rank has its row, so the sum over ranks would be a vector of zeros."""

    def run(channel):
        embedding = nn.Embedding(7, 4)
        embedding.weight.data = torch.zeros(rows_per_rank(7, channel.size), 4)
        apply_split_embedding(embedding, "tokens", channel)
        with pytest.raises(IndexError, match="vocabulary of 7"):
            embedding(torch.tensor([7]))
        return True

    assert on_ranks(2, run) == [True] * 2
