"""What is found in torch's own encoder and in unmodified Hugging Face models, built from a config: written out by hand."""

import pytest
import torch
from torch import Tensor, nn

from shoal.parallel.analysis.analyse import analyse_module
from shoal.parallel.analysis.structure import Heads, ModuleAnalysis, ParallelConfig, SplitKind, Stack
from shoal.parallel.requirements import describe_facts

transformers = pytest.importorskip("transformers")

from support.models.hugging_face import HEADS as H  # noqa: E402  # only where transformers is there
from support.models.hugging_face import VOCAB as V  # noqa: E402
from support.models.hugging_face import WIDTH as D  # noqa: E402
from support.models.hugging_face import Pairs, bert_config, build_causal, gpt2_config, llama_config, t5_config  # noqa: E402

L = 12


def find(model: nn.Module, *example: Tensor) -> ModuleAnalysis:
    return analyse_module(model, example or (torch.randint(1, V, (2, L)),), ParallelConfig())


def kinds(analysis: ModuleAnalysis) -> dict[str, str]:
    return {split.path: split.kind.value for split in analysis.splits}


def bert_splits() -> dict[str, str]:
    found = {"bert.embeddings.word_embeddings": "vocabulary"}
    for layer in ("bert.encoder.layer.0", "bert.encoder.layer.1"):
        found |= {f"{layer}.attention.self.{name}": "column" for name in ("query", "key", "value")}
        found |= {f"{layer}.attention.output.dense": "row", f"{layer}.intermediate.dense": "column"}
        found |= {f"{layer}.output.dense": "row"}
    return found


def test_gpt2():
    found = find(transformers.GPT2LMHeadModel(gpt2_config()))
    expected = {"transformer.wte": "vocabulary", "lm_head": "logits"}
    for block in ("transformer.h.0", "transformer.h.1"):
        expected |= {f"{block}.attn.c_attn": "column", f"{block}.attn.c_proj": "row"}
        expected |= {f"{block}.mlp.c_fc": "column", f"{block}.mlp.c_proj": "row"}
    assert kinds(found) == expected
    assert {split.path: split.parts for split in found.splits if split.parts > 1} == {
        "transformer.h.0.attn.c_attn": 3,
        "transformer.h.1.attn.c_attn": 3,
    }
    # num_heads and embed_dim are attributes too, and the forward pass does not read them.
    assert found.attentions == tuple(
        Heads(path=f"transformer.h.{n}.attn", num_heads=H, num_kv_heads=H, divided={"split_size": D}, dropout=0.1)
        for n in range(2)
    )
    assert found.stacks == (Stack(blocks=("transformer.h.0", "transformer.h.1"), sequence_dim=1, is_pointwise=True),)
    assert found.tied == (("transformer.wte.weight", "lm_head.weight"),)
    # Its last lines view the stream by the length of the input, so a part of the positions would not go through.
    assert (found.sequence, found.tail_is_pointwise) == (L, False)
    assert "positions or types" in found.replicated["transformer.wpe"]


@pytest.mark.parametrize("tied", [False, True])
def test_llama(tied):
    found = find(transformers.LlamaForCausalLM(llama_config(tie_word_embeddings=tied)))
    expected = {"model.embed_tokens": "vocabulary", "lm_head": "logits"}
    for layer in ("model.layers.0", "model.layers.1"):
        expected |= {f"{layer}.self_attn.{name}_proj": "column" for name in "qkv"}
        expected |= {f"{layer}.mlp.{name}_proj": "column" for name in ("gate", "up")}
        expected |= {f"{layer}.self_attn.o_proj": "row", f"{layer}.mlp.down_proj": "row"}
    assert kinds(found) == expected
    assert found.attentions[0] == Heads(path="model.layers.0.self_attn", num_heads=H, num_kv_heads=2)
    assert found.stacks == (Stack(blocks=("model.layers.0", "model.layers.1"), sequence_dim=1, is_pointwise=True),)
    assert found.tail_is_pointwise and bool(found.tied) == tied
    assert set(found.replicated.values()) == {"a norm: small, and it needs all features"}


def test_bert_for_masked_words():
    found = find(transformers.BertForMaskedLM(bert_config()))
    assert kinds(found) == bert_splits() | {"cls.predictions.decoder": "logits"}
    assert found.attentions[0] == Heads(
        path="bert.encoder.layer.0.attention.self", num_heads=H, num_kv_heads=H, dropout=0.1
    )
    assert found.stacks[0].blocks == ("bert.encoder.layer.0", "bert.encoder.layer.1")
    assert found.stacks[0].is_pointwise and found.tail_is_pointwise
    # The bias has two names, one of them in a module that is not split itself.
    assert ("cls.predictions.bias", "cls.predictions.decoder.bias") in found.tied
    assert "cls.predictions" not in found.replicated
    assert "normalises" in found.replicated["cls.predictions.transform.dense"]


def test_bert_for_classification_pools_and_ends_in_a_pair():
    found = find(transformers.BertForSequenceClassification(bert_config(num_labels=3)))
    assert kinds(found) == bert_splits() | {"bert.pooler.dense": "column", "classifier": "row"}
    assert found.split_dropouts == {"dropout": -1}
    assert not found.tail_is_pointwise and found.sequence == L


def test_bert_with_a_padding_mask_and_types_as_inputs():
    ids, mask, types = (
        torch.randint(1, V, (2, L)),
        torch.ones(2, L, dtype=torch.long),
        torch.zeros(2, L, dtype=torch.long),
    )
    mask[1, 9:] = 0
    found = find(transformers.BertForMaskedLM(bert_config()), ids, mask, types)
    assert kinds(found) == bert_splits() | {"cls.predictions.decoder": "logits"}
    assert found.stacks[0].is_pointwise and found.tail_is_pointwise


def test_attention_that_hugging_face_writes_out_is_split_by_heads_but_not_along_the_sequence():
    model = transformers.BertForMaskedLM(bert_config(attn_implementation="eager"))
    found = find(model)
    assert kinds(found) == bert_splits() | {"cls.predictions.decoder": "logits"}
    assert not found.stacks[0].is_pointwise
    assert found.split_dropouts == {f"bert.encoder.layer.{n}.attention.self": -3 for n in range(2)}
    assert "attn_implementation='sdpa'" in describe_facts(found, model).obstacle_cp


class Encoder(nn.Module):
    """torch's own encoder between an input and an output."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(D, H, 48, batch_first=batch_first, dropout=0.1)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.batch_first = batch_first
        self.head = nn.Linear(D, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.batch_first else x.transpose(0, 1)
        x = self.encoder(x)
        scores: Tensor = self.head(x if self.batch_first else x.transpose(0, 1))
        return scores


@pytest.mark.parametrize("batch_first", [True, False])
def test_torch_encoder(batch_first):
    found = find(Encoder(batch_first=batch_first), torch.randn(2, L, D))
    layers = ("encoder.layers.0", "encoder.layers.1")
    assert {split.path: split.kind for split in found.splits} == {
        f"{layer}.{name}": kind
        for layer in layers
        for name, kind in (("linear1", SplitKind.COLUMN), ("linear2", SplitKind.ROW))
    }
    assert found.attentions == tuple(
        Heads(path=f"{layer}.self_attn", num_heads=H, num_kv_heads=H, dropout=0.1, is_torch=True) for layer in layers
    )
    assert found.stacks == (Stack(blocks=layers, sequence_dim=1 if batch_first else 0, is_pointwise=True),)
    assert found.split_dropouts == {f"{layer}.dropout": -1 for layer in layers}
    assert found.tail_is_pointwise and found.sequence == L
    assert not any("self_attn" in path for path in found.replicated)


def test_a_sequence_is_not_cut_around_attention_that_stays_whole():
    """T5 adds a bias for all heads to its scores, and Qwen 3 norms its heads: neither is split."""
    tokens = torch.randint(1, V, (2, L))
    found = find(Pairs(transformers.T5ForConditionalGeneration(t5_config())), tokens, tokens)
    assert "is not split" in describe_facts(found).obstacle_sp
    found = find(build_causal(None, "Qwen3", num_key_value_heads=2, head_dim=D // H))
    assert "is not split" in describe_facts(found).obstacle_sp
    assert describe_facts(find(transformers.LlamaForCausalLM(llama_config()))).obstacle_sp == ""
