"""What a forward pass keeps for its backward pass is the same number on tensors without memory as on real ones, to the byte."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode

from shoal.costs.fake import faked
from shoal.costs.saved import measure_saved


def kept(model, *inputs):
    """Bytes, counted on real tensors and on fake ones."""
    with measure_saved(model, *inputs) as real:
        _loss(model(*inputs))
    with faked(model) as mode, mode:
        fakes = [mode.from_tensor(tensor) for tensor in inputs]
        with measure_saved(model, *fakes) as fake:
            _loss(model(*fakes))
    return real.num_bytes, fake.num_bytes


def _loss(output):
    output = output[0] if isinstance(output, tuple) else getattr(output, "logits", output)
    return output.square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("LSTM", {}),
        ("LSTM", {"num_layers": 2, "bidirectional": True, "batch_first": True}),
        ("LSTM", {"bias": False}),
        ("GRU", {"num_layers": 2}),
        ("RNN", {"bidirectional": True}),
    ],
    ids=str,
)
def test_a_recurrent_layer(kind, how, dtype):
    layer = getattr(nn, kind)(10, 24, **how).to(dtype)
    real, fake = kept(layer, torch.randn(7, 3, 10, dtype=dtype))
    assert real == fake > 0


SIZES = (
    (1, 1, 1, 1),
    (16, 4, 32, 32),
    (16, 4, 100, 64),
    (7, 3, 20, 65),
    (3, 33, 100, 65),
    (5, 2, 256, 128),
    (9, 2, 32, 256),
    (40, 8, 8, 20),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("positions", "samples", "inputs", "hidden"), SIZES)
def test_the_workspace_of_an_lstm(positions, samples, inputs, hidden, dtype):
    """Rows that are padded and rows that are not, matrices of many pages and of one."""
    if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor has no bfloat16")
    real, fake = kept(nn.LSTM(inputs, hidden).to(dtype), torch.randn(positions, samples, inputs).to(dtype))
    assert real == fake > 0


class LooksAtPositions(nn.Module):
    """Keeps more for its backward pass where positions do not go up one by one, and looks whether they do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        positions = torch.arange(x.shape[1]).unsqueeze(0).expand(len(x), -1)
        if bool((positions.diff(dim=1) == 1).all()):
            return self.linear(x)
        return self.linear(x).sigmoid()


def test_a_model_that_looks_at_what_it_counted_itself_goes_the_same_way():
    real, fake = kept(LooksAtPositions(), torch.randn(2, 5, 8))
    assert real == fake > 0


class Masked(nn.Module):
    """torch's own transformer, which looks whether its mask is the causal one."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, tgt_mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1]))


class WritesRows(nn.Module):
    """Makes memory first and writes what it computes into it, in several ways."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        rows = torch.zeros(len(x) + 2, 8)
        rows[1:-1] = self.linear(x).sigmoid()
        sums = torch.zeros(len(rows), 8)
        sums.index_add_(0, torch.arange(len(rows)), rows.exp())
        shifted = torch.empty(len(rows), 8)
        shifted.copy_(sums)
        return shifted.tanh()


@pytest.mark.parametrize(("model", "shape"), [(Masked, (2, 5, 8)), (WritesRows, (4, 8))], ids=["mask", "rows"])
def test_constants_that_are_looked_at_or_written_into(model, shape):
    real, fake = kept(model(), torch.randn(shape))
    assert real == fake > 0


def test_the_way_of_a_model_that_looks_at_data_is_not_known():
    class LooksAtTokens(nn.Module):
        def forward(self, tokens):
            padded = torch.zeros(2, 4, dtype=torch.int64)
            padded[:, :3] = tokens
            return padded.float() if bool((padded > 0).all()) else tokens.float()

    model = LooksAtTokens()
    with pytest.raises(DataDependentOutputException), faked(model) as mode, mode:
        model(mode.from_tensor(torch.ones(2, 3, dtype=torch.int64)))


def test_whole_numbers_that_are_made_of_data_have_no_values():
    """torch makes this cast of other operations, the first of which asks for memory; from an empty cache of its own."""
    FakeTensorMode.cache_clear()
    model = nn.Linear(1, 1)
    with faked(model) as mode, mode:
        length = mode.from_tensor(torch.ones(3)).sum().long()
        assert isinstance(length, FakeTensor)
        with pytest.raises(DataDependentOutputException):
            range(length)


def test_constants_cost_no_memory_and_draw_nothing():
    class Large(nn.Module):
        def forward(self, x):
            positions = torch.arange(2**20)
            torch.randint(0, 5, (3,))
            # A square of this has a terabyte.
            return x * (positions[:, None] >= positions[None, :]).shape[0]

    model, before = Large(), torch.random.get_rng_state()
    with faked(model) as mode, mode:
        model(mode.from_tensor(torch.ones(2)))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5"])
def test_a_model_of_hugging_face(name):
    """Where positions go up one by one the mask is left to the attention kernel, and shared heads are not repeated."""
    transformers = pytest.importorskip("transformers")
    from support.models import hugging_face as cases

    kinds = {
        "llama": transformers.LlamaForCausalLM,
        "gpt2": transformers.GPT2LMHeadModel,
        "bert": transformers.BertForMaskedLM,
        "t5": lambda config: cases.Pairs(transformers.T5ForConditionalGeneration(config)),
    }
    # With a cache they do not look at positions.
    model = kinds[name](getattr(cases, f"{name}_config")(use_cache=False))
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    tokens = torch.arange(32).reshape(2, 16)
    real, fake = kept(model, *[tokens] * (2 if name == "t5" else 1))
    assert real == fake > 0
