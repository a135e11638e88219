"""Modules that know nothing of Shoal, laid out by what was found in them, against one process: torch's encoder, Hugging Face.

What the analysis says is only as good as what runs on it, so here nothing is written by hand: the module is analysed, the
techniques act on the analysis, and loss and every gradient are compared in float64, dropout on.
"""

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

from shoal.comm.full_tensor import box
from shoal.comm.mesh import build_mesh
from shoal.core.axes import Axis
from shoal.core.placement import place_whole
from shoal.core.plan import Plan
from shoal.engine.objective import Scoring
from shoal.models.losses import cross_entropy
from shoal.parallel.analysis.analyse import analyse_module
from shoal.parallel.analysis.structure import ParallelConfig
from shoal.parallel.apply import apply_to_model
from shoal.parallel.requirements import describe_facts
from shoal.randomness.dropout import apply_keyed_dropout
from shoal.testing.ranks import run_on_ranks

transformers = pytest.importorskip("transformers")

from support.models.hugging_face import bert_config, gpt2_config, llama_config  # noqa: E402  # only where transformers is there

V, D, H, L, B = 61, 32, 4, 12, 4
BOUND = 1e-12


class Encoder(nn.Module):
    """torch's own encoder, its sequence first, with a padding mask."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(V, D)
        layer = nn.TransformerEncoderLayer(D, H, 48, dropout=dropout, norm_first=True)
        # Dropout inside attention is torch's own argument; it is what cp refuses.
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(D, V)

    def forward(self, ids):
        hidden = self.encoder(self.tokens(ids).transpose(0, 1), src_key_padding_mask=ids == 0)
        return self.head(hidden.transpose(0, 1))


class FusedBlock(nn.Module):
    """One layer for query, key and value, parts outermost; a gate and its value from one layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attend, self.gated = nn.LayerNorm(D), FusedAttention(), Gated()

    def forward(self, x):
        x = x + self.attend(self.norm(x))
        return x + self.gated(x)


class FusedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.qkv, self.out = H, nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x):
        parts = self.qkv(x).view(x.shape[0], -1, 3, self.num_heads, D // H).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both, self.down, self.drop = nn.Linear(D, 96), nn.Linear(48, D), nn.Dropout(0.2)

    def forward(self, x):
        gate, value = self.both(x).chunk(2, dim=-1)
        return self.down(self.drop(nn.functional.silu(gate) * value))


def hugging_face(name: str, dropout: float) -> nn.Module:
    if name == "gpt2":
        return transformers.GPT2LMHeadModel(gpt2_config(vocab_size=V, attn_pdrop=dropout))
    if name == "llama":
        return transformers.LlamaForCausalLM(llama_config(vocab_size=V, attention_dropout=dropout))
    kind = transformers.BertForSequenceClassification if name == "bert classes" else transformers.BertForMaskedLM
    attention = "eager" if name == "bert eager" else "sdpa"
    changes = {"attention_probs_dropout_prob": dropout, "num_labels": 3, "attn_implementation": attention}
    return kind(bert_config(vocab_size=V, **changes))


def build(case: str, dropout: float) -> nn.Module:
    torch.manual_seed(7)
    if case == "encoder":
        model = Encoder(dropout)
    elif case == "fused":
        model = nn.Sequential(nn.Embedding(V, D), nn.Sequential(FusedBlock(), FusedBlock()), nn.Linear(D, V))
    else:
        model = hugging_face(case, dropout)
    return model.double()


def batch(case: str):
    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(1, V, (B, L), generator=generator)
    targets = torch.randint(0, V, (B, L), generator=generator)
    targets[0, :3] = -100
    if case == "encoder":
        ids[1, 9:] = 0
    return ids, targets[:, 3] % 3 if case == "bert classes" else targets


@functools.cache
def reference(case: str, dropout: float):
    torch.set_num_threads(1)
    model = build(case, dropout)
    key = apply_keyed_dropout(model, 3)
    ids, targets = batch(case)
    key.begin(0, range(B))
    with key.drawing():
        loss = cross_entropy(model(ids), targets)
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def run_jobs(world, jobs):
    return [run_job(world, *job) for job in jobs]


def run_job(world, case, text, dropout, mutant):
    plan = Plan.parse(text)
    mesh = build_mesh(world, plan)
    model = build(case, dropout)
    ids, targets = batch(case)
    analysis = falsify(analyse_module(model, (ids[:2],), ParallelConfig()), mutant)
    plan.check(describe_facts(analysis, model), world_size=world.size)
    key = apply_keyed_dropout(model, 3)
    laid = apply_to_model(model, plan=plan, mesh=mesh, analysis=analysis, dropout=key, batch_norm="local")
    scoring = Scoring(cross_entropy, layout=laid, mesh=mesh)
    total = float((targets != -100).sum())
    own, weight = scoring.own_part(targets, total)
    key.begin(0, range(B))
    with key.drawing():
        loss = scoring.loss(model(ids), own) * (weight / total * scoring.factor)
    loss.backward()
    loss = loss.detach().clone()
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if name in laid.partial:
            mesh.channel(Axis.TENSOR).all_reduce_(gradient)
        if mesh.has(Axis.CONTEXT):
            mesh.channel(Axis.CONTEXT).all_reduce_(gradient)
        placement = laid.placements.get(name) or place_whole(gradient.shape)
        # Plain tuples, because what ranks send home is read without running code.
        gradients[name] = (
            gradient,
            [(patch.local_start, patch.whole_start, patch.shape) for patch in placement.patches],
        )
    if mesh.has(Axis.CONTEXT):
        mesh.channel(Axis.CONTEXT).all_reduce_(loss)
    return loss, gradients


TENSOR = [
    (case, text, 0.1)
    for case in ("gpt2", "llama", "bert", "bert classes", "bert eager", "encoder", "fused")
    for text in ("dp=1 tp=2", "dp=1 tp=2 sp=true")
    if not (case == "bert eager" and "sp" in text)
]
TENSOR += [(case, "dp=1 tp=2 sp=true recompute=full", 0.1) for case in ("gpt2", "encoder")]
CONTEXT = [(case, "dp=1 cp=2", 0.0) for case in ("gpt2", "llama", "bert", "bert classes", "encoder", "fused")]
CONTEXT += [(case, "dp=1 cp=2 cp_kind=alltoall", 0.0) for case in ("llama", "bert", "encoder")]
# What the finder said is falsified before it is used: the comparison must see it.
MUTANTS = {
    "a fused layer cut as one": ("gpt2", "dp=1 tp=2", 0.1),
    "a dropout between split layers forgotten": ("fused", "dp=1 tp=2", 0.1),
}
JOBS = [*TENSOR, *CONTEXT]


def falsify(analysis, mutant):
    if mutant == "a fused layer cut as one":
        return replace(analysis, splits=tuple(replace(split, parts=1) for split in analysis.splits))
    if mutant == "a dropout between split layers forgotten":
        return replace(analysis, split_dropouts={})
    return analysis


@pytest.fixture(scope="module")
def found():
    jobs = [(*job, None) for job in JOBS] + [(*job, mutant) for mutant, job in MUTANTS.items()]
    ranks = run_on_ranks(run_jobs, 2, jobs, deadline_seconds=110)
    return {(*job[:2], job[3]): [rank[place] for rank in ranks] for place, job in enumerate(jobs)}


def differences(pieces, case: str, dropout: float):
    """Names of what is off by more than the bound."""
    loss, gradients = reference(case, dropout)
    whole_norm = torch.linalg.vector_norm(torch.stack([gradient.norm() for gradient in gradients.values()]))
    if any(not abs(own_loss - loss) <= BOUND * abs(loss) for own_loss, _ in pieces):
        yield "loss"
    for name, expected in gradients.items():
        whole = torch.full_like(expected, float("nan"))
        for _, own in pieces:
            gradient, patches = own[name]
            for local_start, whole_start, shape in patches:
                whole[box(whole_start, shape)] = gradient[box(local_start, shape)]
        # A gradient that is nothing but rounding, such as that of a key's bias, is bounded by the whole gradient.
        size = max(expected.norm(), 10 * torch.finfo(torch.float64).eps * whole_norm / BOUND)
        if not (whole - expected).norm() <= BOUND * size:
            yield name


@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job[0]}, {job[1]}")
def test_a_module_laid_out_by_what_was_found_equals_one_process(found, job):
    case, text, dropout = job
    assert list(differences(found[case, text, None], case, dropout)) == []


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_falsified_analysis_is_seen(found, mutant):
    case, text, dropout = MUTANTS[mutant]
    assert list(differences(found[case, text, mutant], case, dropout)) != []


def test_the_splits_are_real(found):
    """A rank holds less than the whole of the split matrices: the comparison is not of a model with itself."""
    for case, text, dropout in TENSOR:
        _, gradients = found[case, text, None][0]
        held = sum(gradient.numel() for gradient, _ in gradients.values())
        assert held < 0.75 * sum(gradient.numel() for gradient in reference(case, dropout)[1].values()), case
