"""What needs no second process: refusals, cuts, tracing on meta tensors, the sequence's guards."""

import copy

import pytest
import torch
from torch import nn

from shoal.comm.mesh import pretend_mesh
from shoal.core.errors import RequestError, RunError
from shoal.core.plan import Plan
from shoal.parallel.analysis.structure import Heads, ModuleAnalysis, Split, SplitKind, Stack
from shoal.parallel.tensor.apply import apply_tensor_parallel, place_cut
from shoal.parallel.tensor.sequence import why_whole
from shoal.parallel.tensor.vocabulary import split_cross_entropy
from support.models.tensor_parallel import BATCH, LENGTH, build, encoder, gpt


def split_on(case_or_pair, tp=2, sp=False, rank=0):
    model, analysis = build(case_or_pair, torch.float32) if isinstance(case_or_pair, str) else case_or_pair
    mesh = pretend_mesh(Plan(dp=1, tp=tp, sp=sp), rank)
    return model, apply_tensor_parallel(model, analysis=analysis, mesh=mesh, sequence_parallel=sp), mesh


@pytest.mark.parametrize("sp", [False, True])
def test_a_model_on_meta_traces_forward_and_backward(sp):
    model, analysis = gpt(vocab=67, tied=True)
    model, layout, mesh = split_on((model.to("meta"), analysis), sp=sp)
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long, device="meta")
    scores = model(tokens)
    assert scores.shape == (BATCH, LENGTH, 34)
    split_cross_entropy(scores, tokens, channel=mesh.channel("tp"), vocab=layout.vocab).backward()
    assert all(parameter.grad.shape == parameter.shape for parameter in model.parameters())


def test_names_identity_and_ties_stay():
    model, analysis = gpt(vocab=67, tied=True)
    names, weight = [name for name, _ in model.named_parameters()], model.head.weight
    model, layout, _ = split_on((model, analysis))
    assert [name for name, _ in model.named_parameters()] == names
    assert model.head.weight is weight is model.embedding.weight
    assert "embedding.weight" in layout.placements and "head.weight" not in layout.placements
    assert isinstance(model.head, nn.Linear) and model.head.out_features == 34
    assert layout.splits_logits and layout.vocab == 67 and not layout.partial


def test_local_weights_are_the_patches_of_the_whole():
    whole, _ = build("gpt gqa", torch.float32)
    model, _, _ = split_on("gpt gqa", rank=1)
    assert torch.equal(model.blocks[0].attention.key.weight, whole.blocks[0].attention.key.weight[8:])
    assert torch.equal(model.blocks[0].feed_forward.down.weight, whole.blocks[0].feed_forward.down.weight[:, 44:])
    assert model.blocks[0].attention.kv_heads == 1 and model.blocks[0].attention.heads == 2


def test_fused_parts_are_cut_each_by_itself():
    placement = place_cut((96, 32), dim=0, parts=3, degree=2, rank=1)
    assert placement.local_shape == (48, 32)
    assert [patch.whole_start[0] for patch in placement.patches] == [16, 48, 80]
    assert [patch.local_start[0] for patch in placement.patches] == [0, 16, 32]


def test_a_copied_model_is_a_model():
    model, _, _ = split_on("gpt", sp=True)
    copied = copy.deepcopy(model)
    assert copied.head.weight is not model.head.weight
    assert copied.blocks[0].attention.output.channel is model.blocks[0].attention.output.channel


@pytest.mark.parametrize(("tp", "words"), [(3, "4 heads, which tp=3"), (4, "2 key-value heads, which tp=4")])
def test_heads_that_tp_does_not_divide_are_refused_with_both_numbers(tp, words):
    with pytest.raises(RequestError, match=words):
        split_on("gpt gqa", tp=tp)


def test_features_that_tp_does_not_divide_are_refused():
    analysis = ModuleAnalysis(splits=(Split(path="0", kind=SplitKind.COLUMN), Split(path="2", kind=SplitKind.ROW)))
    with pytest.raises(RequestError, match="9 features, which tp=2"):
        split_on((nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 4)), analysis))


def test_nothing_to_split_is_refused():
    with pytest.raises(RequestError, match="found nothing in Linear"):
        split_on((nn.Linear(2, 2), ModuleAnalysis()))


@pytest.mark.parametrize("option", [{"kdim": 16}, {"add_bias_kv": True}, {"add_zero_attn": True}])
def test_options_of_torchs_attention_that_cannot_be_split_are_refused(option):
    model = nn.Sequential(nn.MultiheadAttention(32, 4, **option))
    with pytest.raises(RequestError, match="cannot be split"):
        split_on((model, ModuleAnalysis(attentions=(Heads(path="0", num_heads=4, num_kv_heads=4, is_torch=True),))))


def test_weights_by_head_are_refused_and_their_average_is_not():
    model = nn.Sequential(nn.MultiheadAttention(32, 4))
    model, _, _ = split_on(
        (model, ModuleAnalysis(attentions=(Heads(path="0", num_heads=4, num_kv_heads=4, is_torch=True),)))
    )
    x = torch.randn(5, 2, 32)
    with pytest.raises(RequestError, match="weights by head"):
        model[0](x, x, x, average_attn_weights=False)
    assert model[0](x, x, x)[1].shape == (2, 5, 5)


def test_embeddings_whose_options_need_all_rows_are_refused():
    analysis = ModuleAnalysis(splits=(Split(path="0", kind=SplitKind.VOCABULARY),))
    with pytest.raises(RequestError, match="max_norm"):
        split_on((nn.Sequential(nn.Embedding(8, 4, max_norm=1.0)), analysis))


def test_torchs_fused_kernel_is_left_alone_in_evaluation():
    model, analysis = encoder()
    model, _, _ = split_on((model, analysis))
    model.eval()
    with torch.no_grad():
        # The fused kernel would take this rank's matrices for whole ones and stop at their shapes.
        assert model(torch.ones(2, 4, dtype=torch.long)).shape == (2, 4, 32)


def test_a_sequence_that_tp_does_not_divide_is_an_error_with_both_numbers():
    model, _, _ = split_on("gpt", sp=True)
    with pytest.raises(RunError, match=r"sequence of 7 .* tp=2 .* 6 or 8"):
        model(torch.zeros(1, 7, dtype=torch.long))


def test_a_block_that_attends_in_its_own_forward_keeps_its_sequence():
    stack = Stack(blocks=("a.0",), sequence_dim=1)
    splits = (Split(path="a.0.query", kind=SplitKind.COLUMN), Split(path="a.0.out", kind=SplitKind.ROW))
    analysis = ModuleAnalysis(
        stacks=(stack,), splits=splits, attentions=(Heads(path="a.0", num_heads=4, num_kv_heads=4),)
    )
    assert "in its own forward" in why_whole(analysis, stack)
    assert "no sequence" in why_whole(analysis, Stack(blocks=("a.0",)))
    assert "mix positions" in why_whole(analysis, Stack(blocks=("a.0",), sequence_dim=1, is_pointwise=False))


def test_a_sequence_stays_whole_around_an_attention_that_is_not_split():
    """Each rank would attend to its own positions: T5 trained so, and only the numbers told."""
    stack = Stack(blocks=("a.0", "a.1"), sequence_dim=1, is_pointwise=True)
    heads = tuple(Heads(path=f"a.{number}.attention", num_heads=4, num_kv_heads=2) for number in range(2))
    attends = tuple(attention.path for attention in heads)
    assert why_whole(ModuleAnalysis(stacks=(stack,), attentions=heads, attends=attends), stack) is None
    reason = why_whole(ModuleAnalysis(stacks=(stack,), attentions=heads[:1], attends=attends), stack)
    assert reason is not None and "'a.1.attention' is not split" in reason
    # Those of another stack are its own affair.
    assert why_whole(ModuleAnalysis(stacks=(stack,), attends=("a.10.attention", "b.0.attention")), stack) is None


def test_an_attention_that_changes_its_input_is_refused_under_sp():
    model, analysis = build("gpt", torch.float32)
    attention = model.blocks[0].attention
    honest = attention.forward
    attention.forward = lambda x, **rest: honest(x * 1.0, **rest)
    model, _, _ = split_on((model, analysis), sp=True)
    with pytest.raises(RunError, match=r"blocks.0.attention.* changes its input"):
        model(torch.zeros(1, 8, dtype=torch.long))


def test_layers_that_read_one_input_share_one_crossing():
    model, _, mesh = split_on("gpt")
    with mesh.traffic.counting() as counts:
        model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    # Forward: the embedding and two row layers in each of two blocks. Backward: two inputs in each block, and the head's.
    assert counts["tp", "all_reduce"].calls == (1 + 4) + (4 + 1)


def test_a_second_step_crosses_as_often_as_the_first_and_nothing_is_kept():
    model, _, mesh = split_on("seq2seq", sp=True)
    inputs = [torch.ones(1, 4, dtype=torch.long), torch.ones(1, 8, dtype=torch.long)]
    calls = []
    for _ in range(3):
        with mesh.traffic.counting() as counts:
            model(*inputs).sum().backward()
        calls.append(counts["tp", "all_reduce"].calls)
    # Two embeddings forward; backward the head's input and the memory once in each decoder block, for key and value together.
    assert calls == [2 + 1 + 2] * 3
    entry = model.decoder[0].cross.key.entry
    assert entry._last is None and entry._entered is None
