"""Context parallelism with tensor and sequence parallelism, recompute and dropout, and on unmodified Hugging Face models.

The reference is plain torch in one process, float64, with keyed dropout; what a rank holds of each gradient must agree to 1e-12,
and what crossed between ranks must be what was worked out beforehand.
"""

import os

import pytest
import torch
import torch.nn.functional as F

from shoal.comm.full_tensor import take_local
from shoal.comm.mesh import build_mesh
from shoal.core.axes import Axis
from shoal.core.plan import Plan
from shoal.models.config import GptConfig
from shoal.models.gpt import Gpt
from shoal.parallel.analysis.structure import Heads, ModuleAnalysis, Split, SplitKind, Stack
from shoal.parallel.context.apply import apply_context_parallel
from shoal.parallel.dropout import narrow_dropouts
from shoal.parallel.recompute import apply_recompute
from shoal.parallel.tensor.apply import apply_tensor_parallel
from shoal.randomness.dropout import apply_keyed_dropout
from shoal.testing.parity import assert_close
from shoal.testing.ranks import run_on_ranks

BATCH, VOCAB, HIDDEN, LENGTH = 2, 19, 32, 16
BOUND = 1e-12
# Nothing is downloaded: models are built from a configuration.
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}


def build_gpt():
    return Gpt(GptConfig(layers=2, hidden=HIDDEN, heads=4, kv_heads=2, dropout=0.1), vocab=VOCAB, sequence=LENGTH)


def gpt_analysis():
    splits, heads, blocks = [], [], ("blocks.0", "blocks.1")
    for block in blocks:
        attention, feed = f"{block}.attention", f"{block}.feed_forward"
        columns = [f"{attention}.query", f"{attention}.key", f"{attention}.value", f"{feed}.gate", f"{feed}.up"]
        splits += [Split(path=path, kind=SplitKind.COLUMN) for path in columns]
        splits += [Split(path=path, kind=SplitKind.ROW) for path in (f"{attention}.output", f"{feed}.down")]
        heads.append(Heads(path=attention, num_heads=4, num_kv_heads=2, divided={"heads": 4, "kv_heads": 2}))
    splits.append(Split(path="embedding", kind=SplitKind.VOCABULARY))
    stack = Stack(blocks=blocks, sequence_dim=1)
    return ModuleAnalysis(stacks=(stack,), splits=tuple(splits), attentions=tuple(heads), tail_is_pointwise=True)


def hugging_face(name):
    """An unmodified model from a small configuration, and the paths of its blocks."""
    import transformers

    if name == "llama":
        config = transformers.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
        )
        return transformers.LlamaForCausalLM(config), ("model.layers.0", "model.layers.1")
    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCAB,
            n_positions=LENGTH,
            n_embd=HIDDEN,
            n_layer=2,
            n_head=4,
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
        )
        return transformers.GPT2LMHeadModel(config), ("transformer.h.0", "transformer.h.1")
    config = transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(config), ("bert.encoder.layer.0", "bert.encoder.layer.1")


def build(name):
    torch.manual_seed(3)
    if name == "gpt":
        return build_gpt().double(), gpt_analysis()
    model, blocks = hugging_face(name.partition(",")[0])
    return model.double().train(), ModuleAnalysis(
        stacks=(Stack(blocks=blocks, sequence_dim=1),), tail_is_pointwise=True
    )


def batch_of(name):
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(1, VOCAB, (BATCH, LENGTH), generator=generator)
    arguments = {}
    if "padded" in name:
        arguments["attention_mask"] = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH - 5]])).long()
    return tokens, arguments, torch.randint(VOCAB, (BATCH, LENGTH), generator=generator)


def loss_of(model, tokens, arguments, targets):
    output = model(tokens, **arguments)
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits.reshape(-1, VOCAB), targets.reshape(-1), reduction="sum") / (BATCH * LENGTH)


def run_reference(name):
    torch.set_num_threads(1)
    model, _ = build(name)
    apply_keyed_dropout(model, 11).begin(0, range(BATCH))
    tokens, arguments, targets = batch_of(name)
    loss = loss_of(model, tokens, arguments, targets)
    loss.backward()
    return {"loss": loss.detach().reshape(1), **{key: value.grad for key, value in model.named_parameters()}}


def run_job(mesh, plan, name):
    """Gradients of one step as this rank holds them, summed over its replicas, beside what one process has there."""
    model, analysis = build(name)
    dropout = apply_keyed_dropout(model, 11)
    placements, partial = {}, frozenset()
    if plan.tp > 1:
        layout = apply_tensor_parallel(model, analysis=analysis, mesh=mesh, sequence_parallel=plan.sp)
        placements, partial = layout.placements, layout.partial
    context = apply_context_parallel(model, analysis=analysis, mesh=mesh, kind=plan.cp_kind)
    narrow_dropouts(dropout, analysis=analysis, mesh=mesh, plan=plan)
    if plan.recompute != "none":
        apply_recompute(model, analysis=analysis, mode=plan.recompute, dropout=dropout)
    tokens, arguments, targets = batch_of(name)
    dropout.begin(0, range(BATCH))
    with mesh.traffic.counting() as counts:
        loss = loss_of(model, tokens, arguments, targets[:, context.positions(LENGTH)])
        loss.backward()
    found = {"loss": mesh.replicas.all_reduce_(loss.detach().clone()).reshape(1)}
    for key, parameter in model.named_parameters():
        found[key] = mesh.replicas.all_reduce_(parameter.grad)
        if key in partial:
            mesh.channel(Axis.TENSOR).all_reduce_(parameter.grad)
    whole = run_reference(name)
    expected = {key: take_local(whole[key], placements[key]) if key in placements else whole[key] for key in found}
    counted = {key: traffic for key, traffic in counts.items() if key[0] == "cp"}
    predicted = context.forecast_traffic(recomputes=plan.recompute != "none")
    return {"found": found, "expected": expected, "counted": values_of(counted), "predicted": values_of(predicted)}


def values_of(counts):
    return {" ".join(key): [traffic.calls, traffic.num_bytes] for key, traffic in counts.items()}


def run_rank(world, jobs):
    found, meshes = {}, {}
    for text, name in jobs:
        plan = Plan.parse(text)
        mesh = meshes[text] = meshes.get(text) or build_mesh(world, plan)
        found[f"{text}|{name}"] = run_job(mesh, plan, name)
    return found


JOBS_OF_FOUR = [
    (f"dp=1 tp=2{sp} cp=2 cp_kind={kind}{recompute}", "gpt")
    for kind in ("ring", "alltoall")
    for sp, recompute in (("", ""), (" sp=true", ""), ("", " recompute=selective"), (" sp=true", " recompute=full"))
]
JOBS_OF_TWO = [
    *[
        (f"dp=1 cp=2 cp_kind={kind}", name)
        for kind in ("ring", "alltoall")
        for name in ("llama", "llama, padded", "gpt2", "bert, padded")
    ],
    ("dp=1 cp=2 cp_kind=ring recompute=full", "llama, padded"),
]


def names(jobs):
    return [", ".join(job) for job in jobs]


@pytest.fixture(scope="module")
def four():
    return run_on_ranks(run_rank, 4, JOBS_OF_FOUR, deadline_seconds=110.0)


@pytest.fixture(scope="module")
def two():
    pytest.importorskip("transformers")
    return run_on_ranks(run_rank, 2, JOBS_OF_TWO, deadline_seconds=110.0, environment={**os.environ, **OFFLINE})


def check(job, ranks):
    for rank in ranks:
        found = rank["|".join(job)]
        assert_close(found["expected"], found["found"], bound=BOUND)
        assert found["counted"] == found["predicted"] != {}


@pytest.mark.parametrize("job", JOBS_OF_FOUR, ids=names(JOBS_OF_FOUR))
def test_with_tensor_and_sequence_parallelism(job, four):
    check(job, four)


@pytest.mark.soak
@pytest.mark.parametrize("job", JOBS_OF_TWO, ids=names(JOBS_OF_TWO))
def test_hugging_face_models(job, two):
    check(job, two)
