"""A plan is checked against what was found in a module; the table in the guide is what the rules say."""

import pytest
import torch
from torch import Tensor, nn

from shoal.core.errors import RequestError
from shoal.core.facts import model_facts
from shoal.core.plan import Plan
from shoal.data.spec import DataSpec
from shoal.models.build import build_model
from shoal.models.config import CnnConfig, GptConfig
from shoal.parallel.analysis.analyse import analyse_module
from shoal.parallel.analysis.structure import ParallelConfig
from shoal.parallel.context.positions import Positions
from shoal.parallel.describe import describe, shorten
from shoal.parallel.requirements import describe_facts


@pytest.fixture(scope="module")
def gpt():
    return build_model(
        GptConfig(layers=2, hidden=32, heads=4, kv_heads=2), DataSpec(kind="tokens", vocab=65, sequence=12)
    )


@pytest.fixture(scope="module")
def analysis(gpt):
    return analyse_module(gpt, (torch.randint(0, 65, (2, 12)),), ParallelConfig())


def test_check_asks_the_analysis(analysis):
    Plan.parse("tp=2 sp=true cp=3").check(analysis)
    with pytest.raises(RequestError, match="tp=4 does not divide the 2 key-value heads"):
        Plan.parse("tp=4").check(analysis)
    with pytest.raises(RequestError, match="sequence of 12 is not a multiple of 2 x cp 4 = 8"):
        Plan.parse("cp=4").check(analysis)


def test_the_length_that_is_trained_on_counts_not_that_of_the_example(gpt, analysis):
    Plan.parse("cp=4").check(describe_facts(analysis, gpt, sequence=64))


def test_check_of_a_bare_module_refuses_only_what_its_structure_shows(gpt):
    Plan.parse("tp=3 cp=5").check(gpt)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64), 2, enable_nested_tensor=False)
    with pytest.raises(RequestError, match="tp=3 does not divide the 4 heads"):
        Plan.parse("tp=3").check(encoder)


def test_a_module_in_which_nothing_can_be_split_is_refused():
    model = nn.Sequential(nn.Conv1d(4, 4, 1), nn.ReLU())
    found = analyse_module(model, (torch.randn(2, 4, 6),), ParallelConfig())
    with pytest.raises(RequestError, match=r"no pair of linear layers .* was found in Sequential"):
        Plan.parse("tp=2").check(describe_facts(found, model))


def test_the_reason_for_no_trace_is_part_of_the_refusal(gpt):
    found = analyse_module(gpt, (torch.randn(2, 3),), ParallelConfig())
    with pytest.raises(RequestError, match="could not be traced"):
        Plan.parse("tp=2").check(found)


def test_facts_know_batch_norm_only_from_the_module():
    model = build_model(CnnConfig(), DataSpec(kind="classes", features=(8, 8), classes=10))
    found = analyse_module(model, (torch.randn(2, 8, 8),), ParallelConfig())
    assert describe_facts(found, model).has_batch_norm
    assert not model_facts(found).has_batch_norm


@pytest.mark.parametrize("text", ["cp=2", "cp=3 cp_kind=alltoall", "tp=2 sp=true cp=2", "tp=2 cp=2 cp_kind=alltoall"])
def test_the_rules_want_the_multiple_that_dealing_out_positions_wants(text, analysis):
    plan = Plan.parse(text)
    multiple = Positions(kind=plan.cp_kind, rank=0, degree=plan.cp).num_chunks * (plan.tp if plan.sp else 1)
    facts = describe_facts(analysis, sequence=multiple)
    assert not [problem for problem in plan.problems(facts) if "sequence of" in problem]
    facts = describe_facts(analysis, sequence=multiple * 5 + 1)
    assert [problem for problem in plan.problems(facts) if f"= {multiple};" in problem]


class Inline(nn.Module):
    """A block that attends in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.o(mixed.transpose(1, 2).flatten(2))


def test_why_sequence_parallelism_cannot_cut_is_part_of_the_refusal():
    model = nn.Sequential(Inline(), Inline())
    found = analyse_module(model, (torch.randn(2, 12, 32),), ParallelConfig())
    with pytest.raises(RequestError, match="computes attention in its own forward"):
        Plan.parse("tp=2 sp=true").check(describe_facts(found, model))
    Plan.parse("tp=2").check(describe_facts(found, model))
    Plan.parse("cp=2").check(describe_facts(found, model))


def test_the_description_says_what_is_done_and_what_is_left(analysis):
    lines = describe(analysis, Plan.parse("dp=2 tp=2 sp=true cp=3 zero=2 recompute=full"))
    text = "\n".join(lines)
    assert lines[0] == "found 2 blocks blocks.0-1, sequence in dim 1"
    for words in (
        "blocks.0-1.attention.query, blocks.0-1.attention.key",
        "split along the output dim",
        "blocks.0-1.feed_forward.down: split along the reduction dim",
        "embedding: split along the vocabulary",
        "each rank has 2 of 4 heads and 1 of 2 key-value heads",
        "whole on every tp rank: blocks.0-1.attention_norm",
        "1/2 of the positions",
        "attention crosses 3 ranks by ring; after the last block each rank scores its own positions",
        "each of the 2 dp ranks keeps its share of optimizer state and gradients",
        "each block runs again",
    ):
        assert words in text
    assert describe(analysis, Plan.parse("dp=2")) == lines[:1]


def test_paths_are_shortened_by_their_numbers():
    assert shorten(["a.0.x", "a.1.x", "a.2.x", "b"]) == "a.0-2.x, b"
    assert shorten(["a.0.x", "a.2.x"]) == "a.0+2.x"
    assert shorten(["h.0.1", "h.1.1"]) == "h.0-1.1"
