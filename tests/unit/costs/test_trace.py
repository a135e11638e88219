"""A traced chain says what a real forward pass does: the same weights, the same operations, the same bytes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from shoal.core.errors import RequestError
from shoal.costs.layers import LayerKind, ModelCosts, OpKind, TensorSplit
from shoal.costs.saved import measure_saved
from shoal.costs.trace import trace_module
from support.models import traced as traced_models
from support.models.traced import CASES, LENGTH, VOCAB, WIDTH, Case

ITEM = 4
"""Bytes of a float32."""


def trace(case: Case, num_samples: int = 2, **settings) -> ModelCosts:
    return trace_module(case.build_without_memory(), case.inputs(num_samples), name="traced", **settings)


def kept_bytes(chain: ModelCosts) -> float:
    return sum(layer.kept.whole + layer.kept.split + layer.kept.scores for layer in chain.layers)


def saved_per_sample(model: nn.Module, case: Case, run=None) -> float:
    """What a sample adds to what autograd really saves; what does not grow with the batch is no sample's."""
    counts = []
    for num_samples in (4, 8):
        inputs = case.inputs(num_samples)
        with measure_saved(model, *inputs) as saved:
            output = model(*inputs) if run is None else run(model, inputs)
        counts.append(saved.num_bytes)
        del output
    return (counts[1] - counts[0]) / 4


@pytest.mark.parametrize("name", CASES)
def test_weights_are_counted_once_and_all(name):
    model = CASES[name].build_without_memory()
    chain = trace(CASES[name])
    assert chain.weights == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", CASES)
def test_kept_bytes_are_what_autograd_saves(name):
    assert kept_bytes(trace(CASES[name])) == saved_per_sample(CASES[name].build().train(), CASES[name])


def test_kept_bytes_of_a_recurrent_layer_within_the_pages_of_its_workspace():
    case = Case(lambda: nn.LSTM(32, 64, batch_first=True), lambda count: (torch.zeros(count, 200, 32),))
    # Seven matrices, each on pages of its own, for two samples.
    assert kept_bytes(trace(case)) == pytest.approx(saved_per_sample(case.build().train(), case), abs=7 * 4096 / 2)


@pytest.mark.parametrize("name", CASES)
def test_a_chain_does_not_depend_on_the_batch(name):
    assert trace(CASES[name], 2) == trace(CASES[name], 4) == trace(CASES[name], 1)


@pytest.mark.parametrize("name", ["learned", "encoder", "convolutions", "cnn", "mlp", "sequence", "mlp, batch norm"])
def test_products_are_those_that_torch_counts(name):
    """Where torch's counter sees everything, which it does not with attention in one kernel."""
    model, inputs = CASES[name].build().train(), CASES[name].inputs(2)
    with FlopCounterMode(display=False) as counter:
        model(*inputs)
    assert trace(CASES[name]).forward_flops * 2 == counter.get_total_flops()


@pytest.mark.parametrize("name", ["gpt", "gpt, tied", "gpt, deep"])
def test_operations_of_gpt_by_hand(name):
    model = CASES[name].build_without_memory()
    projections = sum(p.numel() for block in model.blocks for p in block.parameters() if p.ndim == 2)
    attention = 4 * LENGTH * LENGTH * WIDTH * len(model.blocks)
    by_hand = 2 * LENGTH * (projections + WIDTH * VOCAB) + attention
    assert trace(CASES[name]).forward_flops == by_hand


def test_a_block_of_gpt():
    chain = trace(CASES["gpt"])
    assert [(layer.name, layer.kind) for layer in chain.layers] == [
        ("embedding", LayerKind.EMBEDDING),
        *((f"blocks.{place}", LayerKind.BLOCK) for place in range(3)),
        ("norm", LayerKind.HEAD),
    ]
    block = chain.layers[2]
    stream = LENGTH * WIDTH * ITEM
    assert (block.kept.boundary, block.output_bytes, block.kv_bytes) == (stream, stream, stream)
    assert [(op.rows, op.inner, op.outer, op.count) for op in block.ops if op.kind is OpKind.MATMUL] == [
        (LENGTH, WIDTH, WIDTH, 2),
        (LENGTH, WIDTH, WIDTH // 2, 2),
        (LENGTH, WIDTH, 88, 2),
        (LENGTH, 88, WIDTH, 1),
    ]
    (attention,) = (op for op in block.ops if op.kind is OpKind.ATTENTION)
    assert (attention.rows, attention.inner, attention.outer, attention.heads) == (LENGTH, 8, LENGTH, 4)
    assert (attention.causal, attention.is_fused) == (True, True)
    assert (chain.tokens, chain.heads, chain.kv_heads, chain.item_bytes) == (LENGTH, 4, 2, ITEM)
    assert chain.layers[0].kept.boundary == 0
    assert chain.layers[-1].output_bytes == LENGTH * VOCAB * ITEM


def test_tied_weights_are_named():
    first, *_, last = trace(CASES["gpt, tied"]).layers
    assert (first.weights, last.weights, last.tied_to) == (VOCAB * WIDTH, WIDTH, "embedding")
    outside = trace(CASES["learned"]).layers
    # Nobody reads 7 of them, so they are the last link's. The head is a function, and runs with the last block.
    assert outside[-1].tied_to == "table" and outside[0].weights == (VOCAB + LENGTH) * WIDTH
    assert outside[-1].weights == outside[-2].weights + 7


def test_what_lies_between_two_rows_is_a_link():
    chain = trace(CASES["seq2seq"])
    kinds = [layer.kind for layer in chain.layers]
    blocks = [LayerKind.BLOCK] * 6
    assert kinds == [LayerKind.EMBEDDING, *blocks, LayerKind.OTHER, *blocks, LayerKind.HEAD]
    stream = LENGTH * WIDTH * ITEM
    # A decoder block gets the target's stream and the encoded source.
    assert [layer.output_bytes for layer in chain.layers] == [stream] * 7 + [2 * stream] * 6 + [
        stream,
        LENGTH * VOCAB * ITEM,
    ]


def test_blocks_that_are_not_run_again_are_as_if_they_were():
    chain = trace(CASES["gpt, deep"])
    first, *others = (layer for layer in chain.layers if layer.kind is LayerKind.BLOCK)
    assert len(others) == 8 and len(chain.distinct) == 3
    assert {(layer.ops, layer.kept, layer.weights, layer.output_bytes) for layer in others} == {
        (first.ops, first.kept, first.weights, first.output_bytes)
    }


class Uneven(nn.Module):
    """Twelve blocks that carry their numbers; every fourth is wider inside, and one does more, as a setting says."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(place) for place in range(12))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Block(nn.Module):
    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place
        self.num_times = 2 if place == 9 else 1
        self.linear = nn.Linear(8, 16 if place % 4 == 3 else 8)

    def forward(self, x):
        for _ in range(self.num_times):
            x = x + self.linear(x)[..., :8]
        return x


def test_blocks_that_differ_are_told_apart():
    chain = trace(Case(Uneven, lambda n: (torch.randn(n, 8),)))
    assert [layer.name for layer in chain.layers] == [f"blocks.{place}" for place in range(12)]
    flops = [layer.forward_flops for layer in chain.layers]
    plain, wide = 2 * 8 * 8, 2 * 8 * 16
    assert flops == [wide if place % 4 == 3 else 2 * plain if place == 9 else plain for place in range(12)]


class Shared(nn.Module):
    """Five blocks with one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(5))
        for block in self.blocks[1:]:
            block[0].weight = self.blocks[0][0].weight

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_blocks_that_share_weights_count_them_once():
    chain = trace(Case(Shared, lambda n: (torch.randn(n, 8),)))
    assert [layer.weights for layer in chain.layers] == [72, 8, 8, 8, 8]
    assert [layer.tied_to for layer in chain.layers] == [None, *["blocks.0"] * 4]


def test_scores_are_what_selective_recompute_does_not_keep():
    """Softmax, its dropout's mask and its result, of 4 heads; nothing where attention is one kernel."""
    scores = {layer.kept.scores for layer in trace(CASES["encoder"]).layers}
    assert scores == {3 * 4 * LENGTH * LENGTH * ITEM}
    assert {layer.kept.scores for layer in trace(CASES["encoder, no dropout"]).layers} == {0}
    # One head: the result of the softmax, which the product that follows keeps as well. It runs before the block is called.
    once = LENGTH * LENGTH * ITEM
    assert [layer.kept.scores for layer in trace(CASES["learned"]).layers] == [once, once, 0]


def test_on_accelerators_attention_with_dropout_is_one_kernel():
    chain, without = trace(CASES["encoder"], device="cuda"), trace(CASES["encoder, no dropout"])
    for layer, other in zip(chain.layers, without.layers, strict=True):
        assert layer.kept.scores == 0 and OpKind.ATTENTION in {op.kind for op in layer.ops}
        # The three dropouts outside attention keep their masks, and the second layer of the two reads what was dropped.
        masks = (2 * WIDTH + 48) * LENGTH * ITEM
        assert layer.kept.whole - other.kept.whole == masks + 48 * LENGTH * ITEM
    assert chain.forward_flops == trace(CASES["encoder"]).forward_flops


def gpt_cuts(model: nn.Module) -> dict[str, TensorSplit]:
    cuts = {"embedding": TensorSplit.ROWS, "head": TensorSplit.COLUMNS}
    for path, part in model.named_modules():
        if isinstance(part, nn.Linear) and path != "head":
            cuts[path] = TensorSplit.ROWS if path.endswith((".output", ".down")) else TensorSplit.COLUMNS
    return cuts


@pytest.mark.parametrize("name", ["gpt", "gpt, tied"])
def test_cuts(name):
    model = CASES[name].build_without_memory()
    plain, chain = trace(CASES[name]), trace(CASES[name], cuts=gpt_cuts(model))
    assert kept_bytes(chain) == kept_bytes(plain) and chain.weights == plain.weights
    first, block, *_, last = chain.layers
    stream = LENGTH * WIDTH * ITEM
    norms = 2 * WIDTH
    assert (block.whole_weights, block.num_pairs, block.pair_bytes) == (norms, 2, stream)
    assert {op.cut for op in block.ops} == set(TensorSplit)
    # Looking a token up ends with a sum; scores stay split.
    assert (first.split_weights, first.num_pairs, last.num_pairs, last.whole_weights) == (VOCAB * WIDTH, 1, 0, WIDTH)
    assert [op.cut for op in last.ops if op.kind is OpKind.MATMUL] == [TensorSplit.COLUMNS]
    # Outside the split layers, twice: what the norm reads, its factors, the product of the two, what it puts out, dropout's mask.
    assert block.kept.whole == 2 * (4 * stream + LENGTH * ITEM)


def test_a_torch_attention_is_cut_as_a_piece():
    cuts = {f"layers.{place}.self_attn": TensorSplit.ALL for place in range(6)}
    chain = trace(CASES["encoder, no dropout"], cuts=cuts)
    block = chain.layers[0]
    assert (block.num_pairs, block.pair_bytes) == (1, LENGTH * WIDTH * ITEM)
    assert block.split_weights == 4 * WIDTH * WIDTH + 3 * WIDTH
    assert [op.cut for op in block.ops if op.kind is OpKind.MATMUL and op.cut is not TensorSplit.NOTHING] == [
        TensorSplit.COLUMNS,
        TensorSplit.ROWS,
    ]


def test_the_loss_counts_with_the_last_link():
    case = CASES["gpt"]
    targets = torch.zeros(2, LENGTH, dtype=torch.int64)

    def loss(scores, wanted):
        return F.cross_entropy(scores.flatten(0, 1), wanted.flatten())

    def run(model, inputs):
        return loss(model(*inputs), torch.zeros(len(inputs[0]), LENGTH, dtype=torch.int64))

    plain, chain = trace(case), trace(case, loss=loss, targets=targets)
    assert chain.layers[:-1] == plain.layers[:-1]
    assert chain.layers[-1].output_bytes == plain.layers[-1].output_bytes
    # The targets of the real run are counted as saved, because nobody said that they are at hand.
    assert kept_bytes(chain) == saved_per_sample(case.build().train(), case, run) - 8 * LENGTH
    assert kept_bytes(chain) == kept_bytes(plain) + LENGTH * VOCAB * ITEM


@pytest.mark.parametrize("name", ["gpt", "mlp", "cnn"])
def test_autocast(name):
    case = CASES[name]

    def run(model, inputs):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(*inputs)

    chain = trace(case, compute_dtype=torch.bfloat16)
    assert kept_bytes(chain) == saved_per_sample(case.build().train(), case, run)
    assert chain.item_bytes == 2


def test_named_units():
    chain = trace(CASES["cnn"], units=["conv1", "linear1"])
    assert [layer.name for layer in chain.layers] == ["conv1", "linear1"]
    whole = trace(CASES["cnn"])
    assert (chain.weights, kept_bytes(chain), chain.forward_flops) == (
        whole.weights,
        kept_bytes(whole),
        whole.forward_flops,
    )


def test_named_inputs_and_another_batch_dim():
    def streams(num_samples: int):
        return (torch.randn(LENGTH, num_samples, WIDTH),)

    model = traced_models.torch_encoder(batch_first=False).train()
    chain = trace_module(model, {"src": streams(2)[0]}, name="traced", batch_dim=1)
    other = trace(CASES["encoder"])
    assert (chain.forward_flops, chain.weights, chain.tokens) == (other.forward_flops, other.weights, other.tokens)
    assert kept_bytes(chain) == saved_per_sample(model, Case(lambda: model, streams))


def test_the_module_is_left_as_it_was():
    model = CASES["mlp, batch norm"].build().eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attributes = {path: set(part.__dict__) for path, part in model.named_modules()}
    inputs = traced_models.images(2)
    state = torch.random.get_rng_state()
    trace_module(model, inputs, name="traced")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert {path: set(part.__dict__) for path, part in model.named_modules()} == attributes
    assert not any(part.training for part in model.modules()) and torch.equal(torch.random.get_rng_state(), state)
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_a_model_that_fits_nowhere():
    """175 billion weights; none of them is allocated, or this would end the process."""
    with torch.device("meta"):
        model = traced_models.gpt(layers=96, hidden=12288, heads=96, kv_heads=96)
    chain = trace_module(model, traced_models.tokens(2), name="traced")
    assert chain.weights == sum(parameter.numel() for parameter in model.parameters()) > 1.7e11
    assert chain.numbers == (0, *[1] * 96, 2)


class Remembering(nn.Module):
    """Keeps a table that is no buffer, and remembers what it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.table = torch.ones(8)
        self.last = None

    def forward(self, x):
        self.last = self.linear(x) * self.table
        return self.last


def test_tensors_that_are_no_buffers():
    case = Case(Remembering, lambda n: (torch.randn(n, 8),))
    model = case.build_without_memory()
    assert model.table.device.type == "meta"
    chain = trace_module(model, case.inputs(2), name="traced")
    assert chain == trace_module(case.build(), case.inputs(2), name="traced") and model.last is None


class ByValue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), Gate())

    def forward(self, x):
        return self.inner(x)


class Gate(nn.Module):
    def forward(self, x):
        return x if x.sum().item() > 0 else -x


class Chosen(nn.Module):
    def forward(self, x):
        return x[x > 0]


class Unfit(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.Linear(15, 4))


class Broken(nn.Module):
    def forward(self, x):
        raise KeyError("no such thing")


class ByBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        x = self.linear(x)
        return x.relu() if len(x) > 2 else x


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (
            ByValue,
            ["cannot be traced", "inner.1", "Gate", "_local_scalar_dense", "[planner.shape]", "layers, hidden, heads"],
        ),
        (Chosen, ["the values of tensors", "Chosen", "nonzero", "[planner.shape]"]),
        (Unfit, ["forward pass fails: '1' (Linear)", "RuntimeError", "[2, 16] X [15, 4]; mend it there"]),
        (Broken, ["forward pass fails: Broken", "KeyError", "no such thing", "[planner.shape]"]),
        (ByBatch, ["'linear'", "for 4 samples than for 2", "2 operations after 1", "the same for every batch"]),
    ],
)
def test_refusals(build, words, caplog):
    with pytest.raises(RequestError) as refusal:
        trace_module(build(), (torch.randn(2, 8),), name="traced")
    assert all(word in str(refusal.value) for word in words), str(refusal.value)
    assert caplog.records == [], "torch's own tracebacks say nothing that the refusal does not"
