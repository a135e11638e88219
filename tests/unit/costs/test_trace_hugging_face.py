"""Unmodified Hugging Face models, built from a config, traced into chains that say what a real forward pass does."""

import pytest
import torch

from shoal.costs.layers import LayerKind, ModelCosts, OpKind, TensorSplit
from shoal.costs.saved import measure_saved
from shoal.costs.trace import trace_module

transformers = pytest.importorskip("transformers")

from support.models.hugging_face import HEADS, VOCAB, WIDTH, bert_config, gpt2_config, llama_config  # noqa: E402  # only where it is there

LENGTH = 16
STREAM = LENGTH * WIDTH * 4
SCORES = HEADS * LENGTH * LENGTH * 4


def build(name: str, attention: str, **changes):
    kinds = {
        "gpt2": (transformers.GPT2LMHeadModel, gpt2_config),
        "llama": (transformers.LlamaForCausalLM, llama_config),
        "bert": (transformers.BertForMaskedLM, bert_config),
    }
    model, config = kinds[name]
    return model(config(attn_implementation=attention, **changes))


def trace(name: str, attention: str, num_samples: int = 2, cuts=None, device: str = "cpu", **changes) -> ModelCosts:
    with torch.device("meta"):
        model = build(name, attention, **changes)
    ids = torch.zeros((num_samples, LENGTH), dtype=torch.int64)
    return trace_module(model, {"input_ids": ids}, name=name, cuts=cuts, device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_experts_of_mixtral_are_found(dtype):
    """In float32 it was refused, and in bfloat16 its experts were taken to compute nothing."""
    config = transformers.MixtralConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(config).to(dtype)
    chain = trace_module(model, {"input_ids": torch.zeros((2, LENGTH), dtype=torch.int64)}, name="mixtral")
    assert chain.experts == 8 and chain.weights == sum(parameter.numel() for parameter in model.parameters())
    block = chain.layers[1]
    found = {(op.rows, op.inner, op.outer) for op in block.ops if op.experts == 8}
    assert found == {(2 * LENGTH, WIDTH, 2 * 48), (2 * LENGTH, 48, WIDTH)}
    assert block.expert_weights == 8 * 3 * WIDTH * 48 and block.routed_bytes == 2 * LENGTH * WIDTH * dtype.itemsize


@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_weights_bytes_and_batches(name, attention):
    model = build(name, attention).train()
    chain = trace(name, attention)
    assert chain == trace(name, attention, num_samples=4)
    assert chain.weights == sum(parameter.numel() for parameter in model.parameters())
    counts = []
    for num_samples in (4, 8):
        ids = torch.randint(1, VOCAB, (num_samples, LENGTH))
        with measure_saved(model, ids) as saved:
            output = model(ids)
        counts.append(saved.num_bytes)
        del output
    kept = sum(layer.kept.whole + layer.kept.split + layer.kept.scores for layer in chain.layers)
    assert kept == (counts[1] - counts[0]) / 4


@pytest.mark.parametrize(
    ("name", "names", "tied"),
    [
        ("gpt2", ["transformer.wte", "transformer.h.0", "transformer.h.1", "transformer.ln_f"], "transformer.wte"),
        ("llama", ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm"], None),
        ("bert", ["bert.embeddings", "bert.encoder.layer.0", "bert.encoder.layer.1", "cls"], "bert.embeddings"),
    ],
)
def test_links(name, names, tied):
    chain = trace(name, "sdpa")
    assert [layer.name for layer in chain.layers] == names
    assert [layer.kind for layer in chain.layers] == [
        LayerKind.EMBEDDING,
        LayerKind.BLOCK,
        LayerKind.BLOCK,
        LayerKind.HEAD,
    ]
    assert [layer.output_bytes for layer in chain.layers] == [STREAM, STREAM, STREAM, LENGTH * VOCAB * 4]
    assert [layer.kept.boundary for layer in chain.layers] == [0, STREAM, STREAM, STREAM]
    assert chain.layers[-1].tied_to == tied
    assert chain.tokens == LENGTH


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_attention_in_one_kernel_and_in_several_do_the_same_products(name):
    """On a CPU, torch computes an attention with dropout in several kernels."""
    off = {"gpt2": {"attn_pdrop": 0.0}, "llama": {}, "bert": {"attention_probs_dropout_prob": 0.0}}[name]
    fused, plain = trace(name, "sdpa", **off), trace(name, "eager", **off)
    assert fused.forward_flops == plain.forward_flops
    assert fused.heads == HEADS
    (attention,) = (op for op in fused.layers[1].ops if op.kind is OpKind.ATTENTION)
    assert (attention.heads, attention.rows, attention.inner, attention.outer) == (
        HEADS,
        LENGTH,
        WIDTH // HEADS,
        LENGTH,
    )
    assert [layer.kept.scores for layer in fused.layers] == [0, 0, 0, 0]
    # Softmax alone, which the product that follows keeps as well.
    assert [layer.kept.scores for layer in plain.layers] == [0, SCORES, SCORES, 0]
    by_head = {(op.rows, op.inner, op.outer) for op in plain.layers[1].ops if op.count == HEADS}
    assert by_head >= {(LENGTH, WIDTH // HEADS, LENGTH), (LENGTH, LENGTH, WIDTH // HEADS)}


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_attention_with_dropout_is_one_kernel_on_accelerators(name):
    """Except where the model itself writes its scores."""
    chain = trace(name, "sdpa", device="cuda")
    assert [layer.kept.scores for layer in chain.layers] == [0, 0, 0, 0]
    assert chain.forward_flops == trace(name, "sdpa").forward_flops == trace(name, "eager").forward_flops
    assert trace(name, "eager", device="cuda") == trace(name, "eager")


def test_cuts_of_gpt2():
    cuts = {"transformer.wte": TensorSplit.ROWS, "lm_head": TensorSplit.COLUMNS}
    for place in range(2):
        block = f"transformer.h.{place}"
        cuts |= {f"{block}.attn.c_attn": TensorSplit.COLUMNS, f"{block}.attn.c_proj": TensorSplit.ROWS}
        cuts |= {f"{block}.mlp.c_fc": TensorSplit.COLUMNS, f"{block}.mlp.c_proj": TensorSplit.ROWS}
    plain, chain = trace("gpt2", "eager"), trace("gpt2", "eager", cuts=cuts)
    first, block, _, last = chain.layers
    assert (block.num_pairs, block.pair_bytes) == (2, STREAM)
    # Two norms with biases, and the biases of the layers that are cut by rows.
    assert block.whole_weights == 2 * 2 * WIDTH + 2 * WIDTH
    assert (first.split_weights, first.num_pairs) == (VOCAB * WIDTH, 1)
    # The output layer's weight is the embedding's, whose rows are its columns.
    assert [op.cut for op in last.ops if op.kind is OpKind.MATMUL] == [TensorSplit.COLUMNS] and last.num_pairs == 0
    assert block.kept.whole + block.kept.split == plain.layers[1].kept.whole and block.kept.split > 0
    assert block.kept.scores == plain.layers[1].kept.scores
