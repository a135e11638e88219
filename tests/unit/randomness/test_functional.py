"""Functional dropout and attention's dropout by key."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.core.errors import RunError
from shoal.randomness.dropout import DropoutKey
from shoal.randomness.keyed import Window, attend
from support.models.functional_dropout import IDS, Net, gradients, keyed, run

torch.set_num_threads(1)


def test_functional_draws_belong_to_the_sample():
    model, key = keyed(Net())
    x = torch.randn(4, 6, 8)
    whole = run(model, key, x)
    assert torch.equal(run(model, key, x), whole)  # no generator was advanced
    parts = [run(model, key, x[a : a + 2], IDS[a : a + 2]) for a in (0, 2)]
    torch.testing.assert_close(torch.cat(parts), whole)
    assert not torch.equal(run(model, key, x, step=2), whole)
    assert not torch.equal(run(model, key, x, [9, 6, 7, 8])[0], whole[0])
    assert not key.foreign_draws()
    assert not key.odd_shapes()
    state = torch.get_rng_state()
    run(model, key, x)
    assert torch.equal(state, torch.get_rng_state())


def test_modules_and_calls_draw_different_bits():
    class Calls(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat((F.dropout(x, 0.5), F.dropout(x, 0.5)))

    model, key = keyed(nn.Sequential(Calls(), Calls()))
    key.begin(1, [5])
    with key.drawing():
        outputs = [*model[0](torch.ones(1, 4096)), *model[1](torch.ones(1, 4096))]
    for one in range(4):
        for other in range(one):
            assert 0.45 < (outputs[one] == outputs[other]).float().mean().item() < 0.55


def test_a_function_draws_what_a_module_in_its_place_would():
    class Mine(nn.Dropout):
        def forward(self, input: Tensor) -> Tensor:
            return F.dropout(input, self.p, self.training)

    x = torch.randn(4, 10)
    mine, plain = nn.Sequential(Mine(0.4)), nn.Sequential(nn.Dropout(0.4))
    assert torch.equal(run(*keyed(mine), x), run(*keyed(plain), x))


@pytest.mark.parametrize(
    "function",
    [F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout,
     torch.feature_dropout, torch.alpha_dropout],
)  # fmt: skip
def test_every_dropout_function_is_keyed_and_drops(function):
    class Drops(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x, 0.5, self.training)

    model, key = keyed(Drops())
    x = torch.ones((4, 32, 2, 2, 2) if function is F.dropout3d else (4, 32, 6))
    output = run(model, key, x)
    assert torch.equal(run(model, key, x), output)
    assert not torch.equal(output, x)
    assert 0.2 < (output == output.min()).float().mean().item() < 0.8
    assert not key.foreign_draws()
    model.eval()
    assert torch.equal(run(model, key, x), x)


def test_in_place_changes_its_input():
    class Drops(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, 0.5, True, True)

    model, key = keyed(Drops())
    x = torch.ones(2, 50)
    assert run(model, key, x, [1, 2]) is x
    assert (x == 0).any()


def _no_draw(like: Tensor, *, p: float, scale: float, channels: bool) -> Tensor:
    return torch.ones_like(like)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["plain", "causal", "bool", "additive", "blind row", "scale", "gqa"])
def test_attention_written_out_is_torchs(kind, dtype):
    """With a mask that keeps everything, and p so small that nothing is scaled, it is attention without dropout."""
    torch.manual_seed(0)
    heads = 2 if kind == "gqa" else 4
    query = torch.randn(2, 4, 5, 8, dtype=dtype, requires_grad=True)
    key = torch.randn(2, heads, 7 if kind != "causal" else 5, 8, dtype=dtype, requires_grad=True)
    value = torch.randn_like(key, requires_grad=True)
    options = {}
    if kind == "causal":
        options = {"is_causal": True}
    elif kind == "bool":
        options = {"attn_mask": torch.rand(2, 1, 5, 7) > 0.3}
    elif kind == "blind row":
        options = {"attn_mask": (torch.arange(5) != 2)[:, None].expand(5, 7)}
    elif kind == "additive":
        options = {"attn_mask": torch.randn(5, 7, dtype=dtype)}
    elif kind == "scale":
        options = {"scale": 0.9}
    elif kind == "gqa":
        options = {"enable_gqa": True}
    expected = F.scaled_dot_product_attention(query, key, value, **options)
    expected_grads = torch.autograd.grad(expected.square().sum(), (query, key, value))
    found = attend(query, key, value, _no_draw, dropout_p=1e-30, **options)
    grads = torch.autograd.grad(found.square().sum(), (query, key, value))
    assert found.dtype == dtype
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for one, other in zip((found, *grads), (expected, *expected_grads), strict=True):
        assert (one - other).norm() <= tolerance * other.norm()


def test_attention_under_autocast_has_its_type():
    query = torch.randn(2, 2, 4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.scaled_dot_product_attention(query, query, query)
        found = attend(query, query, query, _no_draw, dropout_p=1e-30)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_attentions_dropout_is_the_keyed_mask_on_the_weights():
    class One(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)

    class WrittenOut(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout((x @ x.transpose(-2, -1) / x.shape[-1] ** 0.5).softmax(-1), 0.5, True) @ x

    x = torch.randn(4, 2, 6, 8, dtype=torch.float64)
    torch.testing.assert_close(run(*keyed(One()), x), run(*keyed(WrittenOut()), x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("need_weights", [False, True])
def test_torchs_multihead_attention_is_seen_inside(need_weights):
    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=need_weights)[0]

    model, key = keyed(Uses())
    x = torch.randn(4, 6, 8)
    whole = run(model, key, x)
    assert torch.equal(run(model, key, x), whole)
    torch.testing.assert_close(run(model, key, x[2:], IDS[2:]), whole[2:])
    assert not key.foreign_draws()
    # Both ways to compute it draw the same bits for (head, query, key).
    other, other_key = keyed(Uses())
    other_run = run(other, other_key, x)
    torch.testing.assert_close(other_run, whole)


def test_both_forms_of_multihead_attention_draw_the_same_mask():
    class Uses(nn.Module):
        def __init__(self, need_weights: bool) -> None:
            super().__init__()
            self.need_weights = need_weights
            self.attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=self.need_weights)[0]

    x = torch.randn(4, 6, 8)
    torch.testing.assert_close(run(*keyed(Uses(False)), x), run(*keyed(Uses(True)), x))


def test_torchs_encoder_layer_is_keyed_whole():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True)
    model, key = keyed(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    x = torch.randn(4, 6, 8)
    whole = run(model, key, x)
    torch.testing.assert_close(run(model, key, x[1:2], IDS[1:2]), whole[1:2])
    assert not key.foreign_draws()


def test_a_split_attention_draws_the_mask_of_its_heads():
    class One(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = One()

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(self.attention(x).transpose(1, 2).flatten(2), 0.5)

    x = torch.randn(4, 4, 6, 8)
    model, key = keyed(Block())
    key.begin(1, IDS)
    with key.drawing():
        whole = model.attention(x)
    key.narrow("attention", (), attention=(Window(1, (1,), 2),))
    key.begin(1, IDS)
    with key.drawing():
        part = model.attention(x[:, 2:])
    assert torch.equal(part, whole[:, 2:])


def test_functional_draws_on_the_stream_and_on_split_features_are_told_apart():
    class Feed(nn.Module):
        def forward(self, stream: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
            return F.dropout(features, 0.5), F.dropout(stream, 0.5)

    stream, features = torch.ones(4, 8, 6), torch.ones(4, 8, 20)

    def run(narrow: dict, stream: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        model, key = keyed(nn.Sequential(Feed()))
        if narrow:
            key.narrow("0", **narrow)
        key.begin(1, IDS)
        with key.drawing():
            return model[0](stream, features)

    whole_features, whole_stream = run({}, stream, features)
    narrow = {"windows": (Window(1, (1,), 2),), "split": (Window(-1, (0,), 2),), "split_width": 10, "stream_width": 6}
    part_features, part_stream = run(narrow, stream[:, 4:], features[..., :10])
    assert torch.equal(part_features, whole_features[..., :10])
    assert torch.equal(part_stream, whole_stream[:, 4:])
    with pytest.raises(RunError, match="cannot be told"):
        run(narrow | {"stream_width": 10}, stream[:, 4:], features[..., :10])


@pytest.mark.parametrize("with_contexts", [True, False])
def test_a_recompute_draws_the_same_bits_again(with_contexts):
    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(F.dropout(torch.tanh(self.linear(x)), 0.5, self.training))

    class Recomputes(nn.Module):
        def __init__(self, contexts: bool, recompute: bool) -> None:
            super().__init__()
            self.blocks = nn.ModuleList((Net() if contexts else Once()) for _ in range(2))
            self.key: DropoutKey | None = None
            self.recompute = recompute

        def forward(self, x: Tensor) -> Tensor:
            options = {"context_fn": self.key.recompute_contexts} if with_contexts and self.recompute else {}
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False, **options) if self.recompute else block(x)
            return x

    x = torch.randn(4, 6, 8)
    plain, plain_key = keyed(Recomputes(with_contexts, False))
    again, again_key = keyed(Recomputes(with_contexts, True))
    again.key = again_key
    for step in (1, 2, 3):  # the first finds out, the later ones know
        expected = gradients(plain, run(plain, plain_key, x, step=step))
        output = run(again, again_key, x, step=step)
        if with_contexts:
            again_key.begin(9, [100])  # as in a pipeline: the next microbatch begins before this one's backward
        assert all(map(torch.equal, gradients(again, output), expected)), step


def test_a_model_of_modules_runs_without_the_mode():
    model, key = keyed(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Sequential(nn.ReLU())))
    x = torch.randn(4, 8)
    first = run(model, key, x)
    assert torch.equal(run(model, key, x), first)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    key.begin(1, IDS)
    with key.drawing():
        assert torch._C._len_torch_function_stack() == 0
