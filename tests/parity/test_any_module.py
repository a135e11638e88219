"""Modules that know nothing of Shoal, laid out by what was found in them, against one process: torch's encoder, Hugging Face.

What the finder says is only as good as what comes of it, so here nothing is written by hand: the anatomy is found, the techniques
act on it, and loss and every gradient are compared in float64, dropout on.
"""

import functools

import pytest
import torch
from torch import nn

from shoal.comm.mesh import build_mesh
from shoal.core.axes import Axis
from shoal.core.placement import place_whole
from shoal.core.plan import Plan
from shoal.models.build import cross_entropy
from shoal.models.dropout import apply_keyed_dropout
from shoal.parallel.apply import apply_to_model
from shoal.parallel.config import ParallelConfig
from shoal.parallel.find import find_anatomy
from shoal.parallel.pieces import put_local
from shoal.parallel.rules import describe_facts
from shoal.testing.ranks import run_on_ranks
from shoal.trainer.scoring import Scoring

transformers = pytest.importorskip("transformers")

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
        config = transformers.GPT2Config(
            vocab_size=V, n_positions=32, n_embd=D, n_layer=2, n_head=H, attn_pdrop=dropout, bos_token_id=0, eos_token_id=0
        )
        return transformers.GPT2LMHeadModel(config)
    if name == "llama":
        config = transformers.LlamaConfig(
            vocab_size=V,
            hidden_size=D,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=H,
            num_key_value_heads=2,
            max_position_embeddings=32,
            attention_dropout=dropout,
        )
        return transformers.LlamaForCausalLM(config)
    config = transformers.BertConfig(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=H,
        max_position_embeddings=32,
        attention_probs_dropout_prob=dropout,
        num_labels=3,
        attn_implementation="eager" if name == "bert eager" else "sdpa",
    )
    kind = transformers.BertForSequenceClassification if name == "bert classes" else transformers.BertForMaskedLM
    return kind(config)


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
    loss = cross_entropy(model(ids), targets)
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def run_jobs(world, jobs):
    return [run_job(world, *job) for job in jobs]


def run_job(world, case, text, dropout):
    plan = Plan.parse(text)
    mesh = build_mesh(world, plan)
    model = build(case, dropout)
    ids, targets = batch(case)
    anatomy = find_anatomy(model, (ids[:2],), ParallelConfig())
    plan.check(describe_facts(anatomy, model), world_size=world.size)
    key = apply_keyed_dropout(model, 3)
    laid = apply_to_model(model, plan=plan, mesh=mesh, anatomy=anatomy, dropout=key, batch_norm="local")
    scoring = Scoring(cross_entropy, laid=laid, mesh=mesh)
    total = float((targets != -100).sum())
    own, weight = scoring.own_part(targets, total)
    key.begin(0, range(B))
    loss = scoring.loss(model(ids), own) * (weight / total * scoring.factor)
    loss.backward()
    loss = loss.detach().clone()
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if name in laid.partial:
            mesh.channel(Axis.TENSOR).sum_(gradient)
        if mesh.has(Axis.CONTEXT):
            mesh.channel(Axis.CONTEXT).sum_(gradient)
        gradients[name] = (gradient, laid.placements.get(name) or place_whole(gradient.shape))
    if mesh.has(Axis.CONTEXT):
        mesh.channel(Axis.CONTEXT).sum_(loss)
    return loss, gradients


TENSOR = [
    (case, text, 0.1)
    for case in ("gpt2", "llama", "bert", "bert classes", "bert eager", "encoder", "fused")
    for text in ("dp=1 tp=2", "dp=1 tp=2 sp=true", "dp=1 tp=2 recompute=full")
    if not (case == "bert eager" and "sp" in text)
]
CONTEXT = [
    (case, text, 0.0)
    for case in ("gpt2", "llama", "bert", "bert classes", "encoder", "fused")
    for text in ("dp=1 cp=2", "dp=1 cp=2 cp_kind=alltoall")
]
JOBS = TENSOR + CONTEXT


@pytest.fixture(scope="module")
def found():
    ranks = run_on_ranks(run_jobs, 2, JOBS, deadline_seconds=110)
    return {job[:2]: [rank[place] for rank in ranks] for place, job in enumerate(JOBS)}


@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job[0]}, {job[1]}")
def test_a_module_laid_out_by_what_was_found_equals_one_process(found, job):
    case, text, dropout = job
    loss, gradients = reference(case, dropout)
    pieces = found[case, text]
    whole_norm = torch.linalg.vector_norm(torch.stack([gradient.norm() for gradient in gradients.values()]))
    for own_loss, _ in pieces:
        assert abs(own_loss - loss) <= BOUND * abs(loss)
    for name, expected in gradients.items():
        whole = torch.full_like(expected, float("nan"))
        for _, own in pieces:
            put_local(whole, *reversed(own[name]))
        # A gradient that is nothing but rounding, such as that of a key's bias, is bounded by the whole gradient.
        size = max(expected.norm(), 10 * torch.finfo(torch.float64).eps * whole_norm / BOUND)
        assert (whole - expected).norm() <= BOUND * size, name


def test_the_splits_are_real(found):
    """Each case holds less than the whole of its split matrices on a rank: the comparison is not of a model with itself."""
    for case, text, dropout in TENSOR:
        _, gradients = found[case, text][0]
        held = sum(gradient.numel() for gradient, _ in gradients.values())
        assert held < 0.75 * sum(gradient.numel() for gradient in reference(case, dropout)[1].values()), case
