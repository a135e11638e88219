"""The gpt: what it sees, what it shares, and that it learns."""

import math

import torch

from shoal.models.config import GptConfig
from shoal.models.gpt import Gpt
from shoal.models.losses import cross_entropy

torch.set_num_threads(1)
SMALL = GptConfig(layers=2, hidden=32, heads=4, kv_heads=2)


def _build(config: GptConfig = SMALL) -> Gpt:
    torch.manual_seed(0)
    return Gpt(config, vocab=16, sequence=12)


def test_a_token_changes_nothing_before_it() -> None:
    model = _build()
    tokens = torch.randint(0, 16, (2, 12))
    changed = tokens.clone()
    changed[:, 6] = (changed[:, 6] + 1) % 16
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6:], after[:, 6:])


def test_the_order_of_earlier_tokens_matters() -> None:
    # One layer: in more of them the causal mask alone would tell an order.
    model = _build(SMALL.model_copy(update={"layers": 1}))
    assert not torch.allclose(model(torch.tensor([[1, 2, 3]]))[0, -1], model(torch.tensor([[2, 1, 3]]))[0, -1])


def test_it_starts_near_the_loss_of_a_guess() -> None:
    tokens = torch.randint(0, 16, (8, 12))
    loss = cross_entropy(_build()(tokens), torch.randint(0, 16, (8, 12)))
    assert abs(loss.item() - math.log(16)) < 1.0


def test_tied_embeddings_are_one_matrix() -> None:
    tied = _build(SMALL.model_copy(update={"tied": True}))
    names = dict(tied.named_parameters())
    assert tied.head.weight is tied.embedding.weight
    assert "head.weight" not in names
    assert sum(p.numel() for p in _build().parameters()) == sum(p.numel() for p in names.values()) + 16 * 32


def test_the_seed_decides_the_weights() -> None:
    for one, two in zip(_build().parameters(), _build().parameters(), strict=True):
        assert torch.equal(one, two)


def test_every_parameter_gets_a_gradient() -> None:
    model = _build()
    tokens = torch.randint(0, 16, (2, 12))
    cross_entropy(model(tokens), tokens).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_dropout_is_in_the_embedding_and_in_both_branches() -> None:
    model = _build(SMALL.model_copy(update={"dropout": 0.3}))
    drops = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Dropout) and module.p == 0.3]
    assert len(drops) == 1 + 2 * 2
    tokens = torch.randint(0, 16, (2, 12))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_it_learns_to_count() -> None:
    model = _build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = (torch.arange(13)[None] + torch.arange(16)[:, None]) % 16
    for _ in range(40):
        loss = cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
