"""A transformer from its numbers: parameters of known models, FLOPs as papers count them, activations of the paper's table."""

from dataclasses import replace

import pytest

from shoal.core.errors import RequestError
from shoal.costs.layers import LayerKind, OpKind
from shoal.costs.transformer import TransformerShape, transformer_costs
from support.planner.jobs import shape_of

GPT3 = TransformerShape(layers=96, hidden=12288, heads=96, vocab=51200, sequence=2048)
LLAMA_70B = TransformerShape(
    layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256, sequence=8192,
    is_gated=True, tied=False, dropout=False, learned_positions=False,
)  # fmt: skip
LLAMA_405B = TransformerShape(
    layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248, vocab=128256, sequence=8192,
    is_gated=True, tied=False, dropout=False, learned_positions=False,
)  # fmt: skip


def block_of(shape: TransformerShape):
    return next(layer for layer in transformer_costs(shape).layers if layer.kind is LayerKind.BLOCK)


def test_gpt3_has_the_parameters_that_megatron_counts():
    """12 l h^2 (1 + 13/12h + (V + s)/12lh) (Narayanan et al. 2021, eq. 2), and the two vectors of the last norm."""
    size, layers, hidden = GPT3, GPT3.layers, GPT3.hidden
    counted = 12 * layers * hidden**2 + 13 * layers * hidden + (size.vocab + size.sequence) * hidden
    assert transformer_costs(GPT3).weights == counted + 2 * hidden
    assert round(counted / 1e8) == 1746


@pytest.mark.parametrize(("shape", "published"), [(LLAMA_70B, 70_553_706_496), (LLAMA_405B, 405_853_388_800)])
def test_llama_3_has_its_published_parameters(shape, published):
    assert transformer_costs(shape).weights == published


def test_forward_flops_are_megatrons():
    """24 B s l h^2 (1 + s/6h + V/12lh): of the whole step with recompute, 96 ... V/16lh, a fourth but for the output layer."""
    size, layers, hidden = GPT3, GPT3.layers, GPT3.hidden
    blocks = 24 * size.sequence * layers * hidden**2
    wanted = blocks * (1 + size.sequence / (6 * hidden) + size.vocab / (12 * layers * hidden))
    assert transformer_costs(GPT3).forward_flops == pytest.approx(wanted, rel=1e-12)


def test_what_a_block_keeps_is_the_papers_list():
    """Korthikanti et al. 2022, Table 2: s b h (10 + 24/t + 5 a s / h t)."""
    kept = block_of(GPT3).kept
    area = GPT3.sequence * GPT3.hidden
    assert (kept.whole, kept.split) == (10 * area, 24 * area)
    assert kept.scores == 5 * GPT3.heads * GPT3.sequence**2 and kept.boundary == 2 * area


def test_a_fused_attention_keeps_no_scores_and_one_float_a_row():
    fused, plain = (block_of(shape_of(fused_attention=fused)).kept for fused in (True, False))
    shape = shape_of()
    assert fused.scores == 0 and plain.scores > 0
    assert fused.split - plain.split == 4 * shape.heads * shape.sequence


def test_what_is_not_fused_is_read_and_written_by_every_operation_of_it():
    """Bytes by hand, of an element in 16 bit: a norm 36 in place of 4, a rotation 20, a gate 10 in place of 6."""
    moved, kept = [], []
    for fused in (True, False):
        block = block_of(replace(LLAMA_70B, fused_attention=True, fused_pointwise=fused))
        moved.append(sum(op.num_bytes * op.count for op in block.ops if op.kind is OpKind.MEMORY))
        kept.append(block.kept)
    tokens, hidden, keys, ffn = 8192, 8192, 1024, 28672
    assert moved[1] - moved[0] == tokens * (2 * hidden * 32 + (hidden + keys) * 20 + ffn * 4)
    # Each norm keeps its input in float32 and its result before the weights; the gate what it hands to its product.
    assert kept[1].whole - kept[0].whole == tokens * 2 * hidden * 6
    assert kept[1].split - kept[0].split == tokens * ffn * 2
    # LayerNorm and GELU are one kernel each in any software.
    plain, same = (block_of(replace(GPT3, fused_pointwise=fused)) for fused in (True, False))
    assert plain == same


def test_fewer_key_value_heads_mean_fewer_weights_and_less_to_pass_round():
    many, few = block_of(shape_of(kv_heads=16)), block_of(shape_of(kv_heads=4))
    hidden, narrower = 1024, 2 * (1024 - 256)
    assert many.weights - few.weights == hidden * narrower + narrower
    assert (many.kv_bytes, few.kv_bytes) == (2 * 1024 * 1024 * 2, 2 * 1024 * 256 * 2)


def test_a_tied_matrix_is_counted_once():
    tied, untied = (transformer_costs(shape_of(tied=tied)) for tied in (True, False))
    assert untied.weights - tied.weights == 51200 * 1024
    assert tied.layers[-1].tied_to == "embedding" and untied.layers[-1].tied_to is None
    assert tied.forward_flops == untied.forward_flops


def test_experts_share_out_tokens_and_hold_weights():
    shape = shape_of(experts=8, chosen_experts=2, expert_ffn=512, dense_layers=1, is_gated=True)
    chain = transformer_costs(shape)
    dense, routed = chain.layers[1], chain.layers[2]
    assert dense.expert_weights == 0 and routed.expert_weights == 8 * 3 * 1024 * 512
    assert routed.routed_bytes == 2 * 1024 * 1024 * 2 and chain.experts == 8
    tokens = 1024
    router, experts = 2 * tokens * 1024 * 8, 2 * tokens * 2 * 3 * 1024 * 512
    attention = dense.forward_flops - 2 * tokens * 3 * 1024 * 4096
    assert routed.forward_flops == pytest.approx(attention + router + experts)


def test_equal_blocks_are_one_kind():
    chain = transformer_costs(shape_of(layers=50))
    assert len(chain.distinct) == 3 and chain.num_blocks == 50 and chain.block_range == (1, 51)
    assert [chain.distinct[number] for number in chain.numbers] == list(chain.layers)


def test_vocabularies_are_padded():
    assert shape_of(vocab=50257).padded_vocab == 50304 and shape_of(vocab=51200).padded_vocab == 51200


@pytest.mark.parametrize("name", ["layers", "hidden", "heads", "vocab", "sequence"])
def test_a_number_below_one_is_refused(name):
    with pytest.raises(RequestError, match=f"{name} of a transformer is 0; give 1 or more"):
        shape_of(**{name: 0})
