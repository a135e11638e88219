"""The encoder-decoder: what each side sees, and that it learns to turn a sequence round."""

import torch

from shoal.models.config import Seq2SeqConfig
from shoal.models.losses import cross_entropy
from shoal.models.seq2seq import PADDING, Seq2Seq

torch.set_num_threads(1)


def _build() -> Seq2Seq:
    torch.manual_seed(0)
    return Seq2Seq(Seq2SeqConfig(layers=1, hidden=32, heads=2), vocab=12, sequence=8)


def test_padding_in_the_source_changes_nothing() -> None:
    model = _build()
    source, target = torch.tensor([[5, 6, 7]]), torch.tensor([[1, 7, 6]])
    padded = torch.tensor([[5, 6, 7, PADDING, PADDING]])
    torch.testing.assert_close(model(source, target), model(padded, target))


def test_every_position_sees_the_whole_source_and_the_target_so_far() -> None:
    model = _build()
    source, target = torch.tensor([[5, 6, 7]]), torch.tensor([[1, 7, 6]])
    plain = model(source, target)
    assert not torch.allclose(plain[:, 0], model(torch.tensor([[5, 6, 8]]), target)[:, 0])
    later = model(source, torch.tensor([[1, 7, 9]]))
    torch.testing.assert_close(plain[:, :2], later[:, :2])
    assert not torch.allclose(plain[:, 2], later[:, 2])


def test_it_learns_to_reverse() -> None:
    model = _build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    words = torch.randint(3, 12, (16, 4))
    source = torch.cat((words, torch.zeros(16, 2, dtype=torch.int64)), dim=1)
    target = torch.cat((words.flip(1), torch.full((16, 1), 2)), dim=1)
    target_in = torch.cat((torch.ones(16, 1, dtype=torch.int64), target[:, :-1]), dim=1)
    for _ in range(60):
        loss = cross_entropy(model(source, target_in), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
