"""Padded samples, budgets of tokens and packed documents in a script: two replicas train what one process does."""

import torch
import torch.nn.functional as F
from torch import nn

import shoal
from shoal.testing.ranks import run_on_ranks


class Reader(nn.Module):
    """One attention layer over tokens, which looks at nothing after a token and into no other document."""

    def __init__(self):
        super().__init__()
        self.embedding, self.query, self.head = nn.Embedding(20, 8), nn.Linear(8, 24, bias=False), nn.Linear(8, 20)

    def forward(self, tokens, documents=None):
        hidden = self.embedding(tokens)
        query, key, value = self.query(hidden).chunk(3, -1)
        seen = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
        if documents is not None:
            seen = seen & (documents[:, :, None] == documents[:, None, :])
        return self.head(hidden + F.scaled_dot_product_attention(query, key, value, attn_mask=seen)).transpose(1, 2)


def documents():
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(1, 20, (2 + index % 9,), generator=draw) for index in range(38)]


def train(world, plan):
    """Losses of two epochs of each kind of batch, the loss of an evaluation, and the weights."""
    padded = [(tokens, tokens % 5) for tokens in documents()]
    packed = shoal.PackedSource(documents(), sequence=16)
    found = []
    for data, options in (
        (padded, {"collate_fn": shoal.PadCollate()}),
        (padded, {"collate_fn": shoal.PadCollate(), "max_tokens": 40}),
        (packed, {}),
    ):
        with shoal.Run(plan=plan, seed=3, world=world) as run:
            model = Reader()
            loader = run.loader(data, global_batch=8, **options)
            run.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss=nn.CrossEntropyLoss())
            losses = [run.step(batch, max_norm=1.0).loss for _ in range(2) for batch in loader]
            found.append((losses, run.evaluate(loader).loss, run.state_dict(whole=True)))
    return found


def test_padding_budgets_and_packing_count_alike_on_two_replicas():
    alone = train(None, "dp=1")
    assert len({len(losses) for losses, _, _ in alone}) == 3, "three kinds of batches, and three numbers of steps"
    for rank in run_on_ranks(train, 2, "dp=2 zero=1", deadline_seconds=120):
        for (losses, evaluated, weights), (own, own_evaluated, own_weights) in zip(alone, rank, strict=True):
            torch.testing.assert_close(own, losses, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(own_evaluated, evaluated, rtol=1e-5, atol=1e-6)
            # AdamW divides by the size of a gradient, so that its rounding near zero is a part of a rate of 0.01.
            torch.testing.assert_close(own_weights, weights, rtol=1e-4, atol=1e-5)
