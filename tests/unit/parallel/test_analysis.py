"""What is found in the shipped models, written out by hand; and that looking leaves no trace."""

import pytest
import torch
from torch import nn

from shoal.data.spec import DataSpec
from shoal.models.build import build_model
from shoal.models.check import facts_of
from shoal.models.config import CnnConfig, GptConfig, MlpConfig, Seq2SeqConfig
from shoal.parallel.analysis.analyse import analyse_module
from shoal.parallel.analysis.structure import Heads, ModuleAnalysis, ParallelConfig, Split, SplitKind, Stack
from shoal.parallel.requirements import describe_facts
from shoal.pipeline.units import find_units

TOKENS = DataSpec(kind="tokens", vocab=65, sequence=12)
PAIRS = DataSpec(kind="pairs", vocab=65, sequence=12)
IMAGES = DataSpec(kind="classes", features=(8, 8), classes=10)


def find(model: nn.Module, *example: torch.Tensor) -> ModuleAnalysis:
    return analyse_module(model, example, ParallelConfig())


def kinds(analysis: ModuleAnalysis) -> dict[str, str]:
    return {split.path: split.kind.value for split in analysis.splits}


def tokens() -> torch.Tensor:
    return torch.randint(0, 65, (2, 12))


def columns(prefix: str, *names: str) -> dict[str, str]:
    return {f"{prefix}.{name}": "column" for name in names}


def test_gpt():
    model = build_model(GptConfig(layers=2, hidden=32, heads=4, kv_heads=2, dropout=0.1), TOKENS)
    found = find(model, tokens())
    expected = {"embedding": "vocabulary"}
    for block in ("blocks.0", "blocks.1"):
        expected |= columns(f"{block}.attention", "query", "key", "value") | {f"{block}.attention.output": "row"}
        expected |= columns(f"{block}.feed_forward", "gate", "up") | {f"{block}.feed_forward.down": "row"}
    assert kinds(found) == expected | {"head": "logits"}
    assert {split.parts for split in found.splits} == {1}
    assert found.stacks == (Stack(blocks=("blocks.0", "blocks.1"), sequence_dim=1, is_pointwise=True),)
    assert found.attentions == tuple(
        Heads(path=f"blocks.{number}.attention", num_heads=4, num_kv_heads=2, divided={"heads": 4, "kv_heads": 2})
        for number in range(2)
    )
    assert (found.sequence, found.tail_is_pointwise, found.tied, found.split_dropouts) == (12, True, (), {})
    norms = [f"blocks.{number}.{name}" for number in range(2) for name in ("attention_norm", "feed_forward_norm")]
    assert sorted(found.replicated) == sorted([*norms, "norm"])


def test_heads_are_told_from_their_width_when_both_are_equal():
    found = find(build_model(GptConfig(layers=1, hidden=16, heads=4, kv_heads=4), TOKENS), tokens())
    assert found.attentions[0].divided == {"heads": 4, "kv_heads": 4}


def test_a_tied_gpt_names_the_embedding_first():
    found = find(build_model(GptConfig(layers=1, hidden=32, heads=4, tied=True), TOKENS), tokens())
    assert found.tied == (("embedding.weight", "head.weight"),)
    assert kinds(found)["embedding"] == "vocabulary" and kinds(found)["head"] == "logits"


def test_seq2seq():
    model = build_model(Seq2SeqConfig(layers=2, hidden=32, heads=4), PAIRS)
    found = find(model, tokens(), tokens()[:, :8])
    expected = {"source_embedding": "vocabulary", "target_embedding": "vocabulary", "head": "logits"}
    for block in ("encoder.0", "encoder.1", "decoder.0", "decoder.1"):
        expected |= columns(f"{block}.feed_forward", "gate", "up") | {f"{block}.feed_forward.down": "row"}
        for attention in ("attention", "cross") if block.startswith("decoder") else ("attention",):
            expected |= columns(f"{block}.{attention}", "query", "key", "value") | {
                f"{block}.{attention}.output": "row"
            }
    assert kinds(found) == expected
    assert [stack.blocks for stack in found.stacks] == [("encoder.0", "encoder.1"), ("decoder.0", "decoder.1")]
    assert all(stack.sequence_dim == 1 and stack.is_pointwise for stack in found.stacks)
    assert len(found.attentions) == 6 and found.sequence == 8 and found.tail_is_pointwise


@pytest.mark.parametrize(
    ("layers", "expected", "dropouts"),
    [
        (1, {"layers.0.linear": "column", "head": "row"}, ["layers.0.dropout"]),
        (2, {"layers.0.linear": "column", "layers.1.linear": "row"}, ["layers.0.dropout"]),
        (
            3,
            {"layers.0.linear": "column", "layers.1.linear": "row", "layers.2.linear": "column", "head": "row"},
            ["layers.0.dropout", "layers.2.dropout"],
        ),
    ],
)
def test_linear_layers_in_a_chain_alternate(layers, expected, dropouts):
    model = build_model(MlpConfig(layers=layers, hidden=32, dropout=0.1), IMAGES)
    found = find(model, torch.randn(2, 8, 8))
    assert kinds(found) == expected
    assert found.split_dropouts == dict.fromkeys(dropouts, -1)
    assert found.stacks == (Stack(blocks=tuple(f"layers.{number}" for number in range(layers)), is_pointwise=False),)
    if layers == 2:
        assert found.replicated == {"head": "it is the model's output"}


def test_batch_norm_between_linear_layers_leaves_them_whole():
    found = find(build_model(MlpConfig(layers=2, hidden=32, batch_norm=True), IMAGES), torch.randn(2, 8, 8))
    assert found.splits == ()
    assert "batch_norm" in found.replicated["layers.0.linear"]


def test_cnn():
    found = find(build_model(CnnConfig(dropout=0.1), IMAGES), torch.randn(2, 8, 8))
    assert found.splits == (
        Split(path="linear1", kind=SplitKind.COLUMN),
        Split(path="linear2", kind=SplitKind.ROW),
    )
    assert found.split_dropouts == {"dropout2": -1} and found.stacks == () and found.sequence is None
    assert sorted(found.replicated) == ["conv1", "conv2", "norm1", "norm2"]


@pytest.mark.parametrize(
    ("config", "spec", "shapes"),
    [
        (GptConfig(layers=3, hidden=32, heads=4, kv_heads=2, dropout=0.1), TOKENS, [(2, 12)]),
        (Seq2SeqConfig(layers=2, hidden=32, heads=4), PAIRS, [(2, 12), (2, 12)]),
        (MlpConfig(layers=1, hidden=32), IMAGES, [(2, 8, 8)]),
        (MlpConfig(layers=4, hidden=32), IMAGES, [(2, 8, 8)]),
        (MlpConfig(layers=2, hidden=32, batch_norm=True), IMAGES, [(2, 8, 8)]),
        (CnnConfig(), IMAGES, [(2, 8, 8)]),
    ],
    ids=["gpt", "seq2seq", "mlp1", "mlp4", "mlp-batch-norm", "cnn"],
)
def test_facts_from_the_config_are_what_is_found_in_the_module(config, spec, shapes):
    model = build_model(config, spec)
    example = [torch.randint(0, 65, shape) if spec.vocab else torch.randn(shape) for shape in shapes]
    found, told = describe_facts(find(model, *example), model), facts_of(config, spec)
    assert told is not None
    names = ("num_blocks", "num_pairs", "heads", "has_attention", "sequence", "has_sequence", "has_batch_norm")
    names += ("attention_dropout", "obstacle_sp", "obstacle_cp")
    assert {name: getattr(found, name) for name in names} == {name: getattr(told, name) for name in names}
    assert [width.size for width in found.widths] == [width.size for width in told.widths]
    if told.num_units is not None:
        units = find_units(model, tuple(example), find(model, *example))
        assert told.num_units == len(units) and all(unit.is_once for unit in units)


def test_a_tied_gpt_says_so_in_its_facts():
    told = facts_of(GptConfig(layers=1, hidden=32, heads=4, tied=True), TOKENS)
    model = build_model(GptConfig(layers=1, hidden=32, heads=4, tied=True), TOKENS)
    units = find_units(model, (tokens(),), find(model, tokens()))
    assert told is not None and told.tied_ends == "embedding.weight"
    assert units[0].path == "embedding" and units[-1].path == "head" and model.head.weight is model.embedding.weight
    plain = facts_of(GptConfig(layers=1, hidden=32, heads=4), TOKENS)
    assert plain is not None and plain.tied_ends == ""


def test_looking_leaves_no_trace_and_gives_the_same_answer_again():
    model = build_model(CnnConfig(dropout=0.5), IMAGES)
    model.norm1.eval()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    attributes = {path: set(vars(module)) for path, module in model.named_modules()}
    state = torch.get_rng_state()
    first = find(model, torch.ones(2, 8, 8))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert {path: set(vars(module)) for path, module in model.named_modules()} == attributes
    assert model.training and not model.norm1.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert find(model, torch.ones(2, 8, 8)) == first


def test_attributes_are_plain_numbers_again_afterwards():
    model = build_model(GptConfig(layers=1, hidden=32, heads=4), TOKENS)
    find(model, tokens())
    assert type(model.blocks[0].attention.heads) is int and type(model.sequence) is int


def test_without_an_example_only_the_structure_is_seen_and_that_is_said():
    model = build_model(GptConfig(layers=2, hidden=32, heads=4), TOKENS)
    found = analyse_module(model, None, ParallelConfig())
    assert found.splits == () and [stack.blocks for stack in found.stacks] == [("blocks.0", "blocks.1")]
    assert found.stacks[0].sequence_dim is None
    assert "not traced" in found.replicated[""]


def test_a_forward_pass_that_fails_is_said_and_not_fatal():
    model = build_model(GptConfig(layers=2, hidden=32, heads=4), TOKENS)
    found = find(model, torch.randn(2, 12))
    assert found.splits == () and "could not be traced" in found.replicated[""]
    assert not any(module._forward_hooks for module in model.modules())
    assert type(model.blocks[0].attention.heads) is int
