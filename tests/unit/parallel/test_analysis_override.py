"""The recipe's table wins over what was found, and is refused in plain words where it cannot be right."""

import pytest
import torch

from shoal.core.config import validate
from shoal.core.errors import RequestError
from shoal.data.spec import DataSpec
from shoal.models.build import build_model
from shoal.models.config import GptConfig, MlpConfig
from shoal.parallel.analysis.analyse import analyse_module
from shoal.parallel.analysis.structure import ModuleAnalysis, ParallelConfig


@pytest.fixture(scope="module")
def gpt():
    return build_model(GptConfig(layers=2, hidden=32, heads=4), DataSpec(kind="tokens", vocab=65, sequence=12))


def find(model, **config) -> ModuleAnalysis:
    return analyse_module(model, (torch.randint(0, 65, (2, 12)),), ParallelConfig(**config))


def test_none_takes_the_whole_pair_out_and_says_so(gpt):
    found = find(gpt, split={"blocks.0.feed_forward.up": "none"})
    paths = {split.path for split in found.splits}
    assert not any(path.startswith("blocks.0.feed_forward") for path in paths)
    assert "blocks.1.feed_forward.up" in paths and "blocks.0.attention.query" in paths
    assert found.replicated["blocks.0.feed_forward.up"] == "parallel.split says none"
    assert "took its partner" in found.replicated["blocks.0.feed_forward.down"]


def test_an_attention_that_loses_a_projection_is_not_split_by_heads(gpt):
    found = find(gpt, split={"blocks.0.attention.key": "none"})
    assert [heads.path for heads in found.attentions] == ["blocks.1.attention"]


def test_the_last_match_wins(gpt):
    found = find(gpt, split={"blocks.*.feed_forward.*": "none", "blocks.1.feed_forward.*": "none", "head": "none"})
    assert all("feed_forward" not in split.path and split.path != "head" for split in found.splits)


def test_a_tied_weight_is_whole_in_both_layers_or_in_neither():
    data = DataSpec(kind="tokens", vocab=65, sequence=12)
    model = build_model(GptConfig(layers=1, hidden=32, heads=4, tied=True), data)
    found = find(model, split={"head": "none"})
    assert not {"head", "embedding"} & {split.path for split in found.splits}
    assert found.replicated["embedding"] == "its weight is that of head, which stays whole"


def test_layers_that_no_trace_found_can_be_named():
    data = DataSpec(kind="classes", features=(8, 8), classes=10)
    model = build_model(MlpConfig(layers=2, hidden=32, batch_norm=True), data)
    found = analyse_module(
        model,
        (torch.randn(2, 8, 8),),
        ParallelConfig(split={"layers.0.linear": "column", "layers.1.linear": "row"}),
    )
    assert [(split.path, split.kind.value) for split in found.splits] == [
        ("layers.0.linear", "column"),
        ("layers.1.linear", "row"),
    ]


def test_named_blocks_take_the_place_of_those_found(gpt):
    found = find(gpt, blocks=["blocks.1"])
    assert [(stack.blocks, stack.sequence_dim) for stack in found.stacks] == [(("blocks.1",), 1)]
    assert find(gpt, blocks=["blocks.*"]).stacks == find(gpt).stacks


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"split": {"blocks.*.atention.query": "column"}},
            ["'blocks.*.atention.query' matches no module of Gpt", "nearest"],
        ),
        ({"blocks": ["layers.*"]}, ["parallel.blocks", "'layers.*' matches no module", "blocks"]),
        ({"split": {"blocks.*.attention_norm": "column"}}, ["needs an nn.Linear", "RMSNorm"]),
        ({"split": {"head": "vocabulary"}}, ["needs an nn.Embedding", "Linear"]),
        (
            {"split": {"blocks.*.feed_forward.*": "none", "blocks.0.feed_forward.gate": "column"}},
            ["is a column layer without its row layer", "name 'blocks.0.feed_forward.down' as row"],
        ),
    ],
)
def test_a_table_that_cannot_be_right_is_refused_with_the_fix(gpt, config, words):
    with pytest.raises(RequestError) as refusal:
        find(gpt, **config)
    for word in words:
        assert word in str(refusal.value)


def test_a_word_that_is_no_split_is_refused_by_the_recipe():
    with pytest.raises(RequestError, match="colum"):
        validate(ParallelConfig, {"split": {"head": "colum"}}, origin="my.toml")
