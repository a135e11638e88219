"""Context parallelism against one process: plain torch that knows nothing of ``parallel/``.

Both sides take the same three steps on the same batches; the ranks sum every gradient over their replicas. Losses, gradients,
norms, weights and optimizer state must agree to 1e-12 in float64 and to 1e-5 in float32.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoal.parallel.context.ring as ring
from shoal.comm.mesh import build_mesh
from shoal.core.plan import Plan
from shoal.models.config import GptConfig, Seq2SeqConfig
from shoal.models.gpt import Gpt
from shoal.models.seq2seq import Seq2Seq
from shoal.parallel.analysis.structure import Heads, ModuleAnalysis, Stack
from shoal.parallel.context.apply import apply_context_parallel
from shoal.testing.parity import assert_close, compare
from shoal.testing.ranks import run_on_ranks

STEPS, BATCH, VOCAB, HIDDEN, LENGTH = 3, 4, 19, 24, 24
BOUNDS = {"float64": 1e-12, "float32": 1e-5}
KINDS = ["ring", "alltoall"]


class Encoder(nn.Module):
    """torch's own encoder, with learned positions and an optional padding mask; one class per position, or one for all."""

    def __init__(self, *, is_batch_first=True, is_padded=False, pools=False, is_causal=False):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.place = nn.Parameter(torch.randn(LENGTH, HIDDEN))
        layer = nn.TransformerEncoderLayer(
            HIDDEN, 6, 2 * HIDDEN, dropout=0.0, batch_first=is_batch_first, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(HIDDEN), enable_nested_tensor=False)
        self.head = nn.Linear(HIDDEN, VOCAB)
        self.is_batch_first, self.is_padded, self.pools, self.is_causal = is_batch_first, is_padded, pools, is_causal

    def forward(self, tokens):
        x = self.embedding(tokens) + self.place[: tokens.shape[1]]
        mask = (
            nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=x.dtype) if self.is_causal else None
        )
        padding = tokens == 0 if self.is_padded else None
        if padding is not None and mask is not None:
            padding = torch.zeros_like(padding, dtype=x.dtype).masked_fill(padding, -torch.inf)
        x = x if self.is_batch_first else x.transpose(0, 1)
        x = self.encoder(x, mask=mask, src_key_padding_mask=padding)
        x = x if self.is_batch_first else x.transpose(0, 1)
        return self.head(x.mean(1) if self.pools else x)


class Tabled(nn.Module):
    """A user's block: rotary tables and an additive mask come as arguments, fewer key heads are broadcast, scale is its own."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.projections = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.output = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x, tables, bias=None):
        parts = self.projections(self.norm(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (6, -1)).transpose(1, 2) for part in parts)
        cos, sin = tables
        query, key = (heads * cos[:, None] + heads.flip(-1) * sin[:, None] for heads in (query, key))
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=0.3)
        return (x + self.output(mixed.transpose(1, 2).flatten(2)),)


class User(nn.Module):
    def __init__(self, *, is_hidden_at_all=False):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Tabled() for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCAB)
        self.is_hidden_at_all = is_hidden_at_all

    def forward(self, tokens):
        x = self.embedding(tokens)
        places = torch.arange(tokens.shape[1], dtype=x.dtype)
        angles = torch.outer(places, torch.arange(1, 5, dtype=x.dtype))[None]
        # Heads see different distances; a window hides what is far away.
        distance = places[None, :] - places[:, None]
        bias = -distance.abs() * torch.arange(1, 7, dtype=x.dtype)[:, None, None] / 10
        bias = bias.masked_fill(distance.abs() > 9, -torch.inf)[None]
        if self.is_hidden_at_all:
            # Some positions see nothing anywhere; torch gives them zeros.
            bias = bias.masked_fill((places == 5)[:, None], -torch.inf)
        for layer in self.layers:
            (x,) = layer(x, (angles.cos(), angles.sin()), bias=bias)
        return self.head(x)


def gpt(**changes):
    return Gpt(GptConfig(layers=2, hidden=HIDDEN, heads=6, dropout=0.0, **changes), vocab=VOCAB, sequence=LENGTH)


def gpt_analysis():
    heads = tuple(Heads(path=f"blocks.{n}.attention", num_heads=6, num_kv_heads=2) for n in range(2))
    stack = Stack(blocks=("blocks.0", "blocks.1"), sequence_dim=1)
    return ModuleAnalysis(stacks=(stack,), attentions=heads, tail_is_pointwise=True)


def encoder_analysis(*, sequence_dim=1, tail_is_pointwise=True):
    stack = Stack(blocks=("encoder.layers.0", "encoder.layers.1"), sequence_dim=sequence_dim)
    return ModuleAnalysis(stacks=(stack,), tail_is_pointwise=tail_is_pointwise)


def user_analysis():
    return ModuleAnalysis(stacks=(Stack(blocks=("layers.0", "layers.1"), sequence_dim=1),), tail_is_pointwise=True)


def seq2seq():
    return Seq2Seq(Seq2SeqConfig(layers=2, hidden=HIDDEN, heads=6, dropout=0.0), vocab=VOCAB, sequence=2 * LENGTH)


def seq2seq_analysis():
    stacks = tuple(Stack(blocks=(f"{side}.0", f"{side}.1"), sequence_dim=1) for side in ("encoder", "decoder"))
    return ModuleAnalysis(stacks=stacks, tail_is_pointwise=True)


CASES = {
    "gpt, shared key heads": (lambda: gpt(kv_heads=2), gpt_analysis),
    "gpt tied, one key head": (lambda: gpt(kv_heads=1, tied=True), gpt_analysis),
    "encoder": (Encoder, encoder_analysis),
    "encoder, padded": (lambda: Encoder(is_padded=True), encoder_analysis),
    "encoder, sequence first": (
        lambda: Encoder(is_padded=True, is_batch_first=False),
        lambda: encoder_analysis(sequence_dim=0),
    ),
    "encoder, causal and padded": (lambda: Encoder(is_padded=True, is_causal=True), encoder_analysis),
    "encoder, pooled": (lambda: Encoder(is_padded=True, pools=True), lambda: encoder_analysis(tail_is_pointwise=False)),
    "seq2seq": (seq2seq, seq2seq_analysis),
    "user, tables and bias": (User, user_analysis),
    "user, blind positions": (lambda: User(is_hidden_at_all=True), user_analysis),
}


def batch_of(case, step):
    """Inputs and targets of one global batch; every sample differs, some targets are not counted, padding varies."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(1, VOCAB, (BATCH, LENGTH), generator=generator)
    if "padded" in case or "pooled" in case or case == "seq2seq":
        for sample in range(BATCH):
            tokens[sample, LENGTH - 3 * sample - 1 :] = 0
    if "pooled" in case:
        return (tokens,), torch.randint(VOCAB, (BATCH,), generator=generator)
    targets = torch.randint(VOCAB, (BATCH, LENGTH), generator=generator)
    targets[1, 7:] = -100
    if case == "seq2seq":
        # The memory is of another length than the stream.
        source = torch.cat((tokens, tokens.flip(1)), dim=1)
        return (source, tokens), targets
    return (tokens,), targets


def loss_of(logits, targets, count):
    total = F.cross_entropy(logits.reshape(-1, VOCAB), targets.reshape(-1), ignore_index=-100, reduction="sum")
    return total / count


def build(case, dtype):
    torch.manual_seed(7)
    model = CASES[case][0]().to(getattr(torch, dtype))
    if case.startswith("encoder") and dtype == "float32":
        # torch's fused bias holds that of the keys, whose true gradient is 0 because softmax does not see it: Adam would divide
        # rounding by rounding. float64 takes the Adam steps.
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, eps=1e-6)


def snapshot(model, optimizer, loss):
    found = {"loss": loss.detach().clone().reshape(1)}
    for name, parameter in model.named_parameters():
        found[f"grad/{name}"] = parameter.grad.clone()
        found[f"weight/{name}"] = parameter.detach().clone()
        for key, value in optimizer.state[parameter].items():
            found[f"optimizer/{name}/{key}"] = torch.as_tensor(value).clone()
    squares = [parameter.grad.double().square().sum() for parameter in model.parameters()]
    found["norm"] = torch.stack(squares).sum().sqrt().reshape(1)
    return found


def run_reference(case, dtype):
    torch.set_num_threads(1)
    model, optimizer = build(case, dtype)
    found = []
    for step in range(STEPS):
        inputs, targets = batch_of(case, step)
        optimizer.zero_grad()
        loss = loss_of(model(*inputs), targets, int((targets != -100).sum()))
        loss.backward()
        optimizer.step()
        found.append(snapshot(model, optimizer, loss))
    return found


def run_context(mesh, plan, case, dtype):
    """The same on one rank: its samples, its positions."""
    model, optimizer = build(case, dtype)
    layout = apply_context_parallel(model, analysis=CASES[case][1](), mesh=mesh, kind=plan.cp_kind)
    found = []
    for step in range(STEPS):
        inputs, targets = batch_of(case, step)
        count = int((targets != -100).sum())
        own = slice(mesh.coordinates["dp"] * BATCH // plan.dp, (mesh.coordinates["dp"] + 1) * BATCH // plan.dp)
        inputs, targets = [tensor[own] for tensor in inputs], targets[own]
        if layout.keeps_local:
            targets = targets[:, layout.positions(targets.shape[1])]
        optimizer.zero_grad()
        loss = loss_of(model(*inputs), targets, count) * layout.loss_factor
        loss.backward()
        for parameter in model.parameters():
            mesh.replicas.all_reduce_(parameter.grad)
        optimizer.step()
        found.append(snapshot(model, optimizer, mesh.replicas.all_reduce_(loss.detach().clone())))
    return found


def run_rank(world, jobs):
    """Every (plan, case, dtype) on this rank."""
    found, meshes = {}, {}
    for text, case, dtype, mutant in jobs:
        plan = Plan.parse(text)
        mesh = meshes[text] = meshes.get(text) or build_mesh(world, plan)
        undo = plant(mutant)
        found["|".join((text, case, dtype, mutant))] = run_context(mesh, plan, case, dtype)
        undo()
    return found


def plant(mutant):
    """Break the real path of this process; the returned function mends it."""
    honest = {name: getattr(ring, name) for name in ("visible_part", "_pass_on", "attend_backward")}

    def part(rank, source, *, causal):
        # The mask at the boundary of the ring taken as if chunks lay one after another.
        return honest["visible_part"](rank, source, causal=causal and source == rank)

    def backward(*args, **kwargs):
        return tuple(grad * 2 for grad in honest["attend_backward"](*args, **kwargs))

    dropped = []

    def pass_on(channel, block):
        # The last hop of the first gradient is lost: the gradient of a neighbour's keys is taken for one's own.
        dropped.append(block)
        return block if len(dropped) == 4 * channel.size else honest["_pass_on"](channel, block)

    if mutant == "wrong mask":
        ring.visible_part = part
    elif mutant == "gradient times cp":
        ring.attend_backward = backward
    elif mutant == "dropped hop":
        ring._pass_on = pass_on

    def undo():
        for name, function in honest.items():
            setattr(ring, name, function)

    return undo


PLANS_OF_TWO = ["dp=1 cp=2 cp_kind=ring", "dp=1 cp=2 cp_kind=alltoall"]
PLANS_OF_THREE = ["dp=1 cp=3 cp_kind=ring", "dp=1 cp=3 cp_kind=alltoall"]
PLANS_OF_FOUR = ["dp=2 cp=2 cp_kind=ring", "dp=2 cp=2 cp_kind=alltoall", "dp=1 cp=4 cp_kind=ring"]
MUTANTS = ["wrong mask", "gradient times cp", "dropped hop"]


def jobs_of(plans, cases, dtypes):
    return [(plan, case, dtype, "") for plan in plans for case in cases for dtype in dtypes]


@pytest.fixture(scope="module")
def reference():
    known = {}

    def of(case, dtype):
        if (case, dtype) not in known:
            known[case, dtype] = run_reference(case, dtype)
        return known[case, dtype]

    return of


IN_FLOAT32 = ["gpt, shared key heads", "encoder, padded", "seq2seq"]
JOBS_OF_TWO = [
    *jobs_of(PLANS_OF_TWO, CASES, ("float64",)),
    *jobs_of(PLANS_OF_TWO, IN_FLOAT32, ("float32",)),
    *[(PLANS_OF_TWO[0], "gpt, shared key heads", "float32", mutant) for mutant in MUTANTS],
]
JOBS_OF_THREE = jobs_of(PLANS_OF_THREE, ["gpt, shared key heads", "encoder, padded", "seq2seq"], ("float64",))
JOBS_OF_FOUR = jobs_of(PLANS_OF_FOUR, ["gpt, shared key heads", "encoder, pooled"], ("float64",))


@pytest.fixture(scope="module")
def two():
    return run_on_ranks(run_rank, 2, JOBS_OF_TWO, deadline_seconds=110.0)


@pytest.fixture(scope="module")
def three():
    return run_on_ranks(run_rank, 3, JOBS_OF_THREE, deadline_seconds=110.0)


@pytest.fixture(scope="module")
def four():
    return run_on_ranks(run_rank, 4, JOBS_OF_FOUR, deadline_seconds=110.0)


def check(job, ranks, reference):
    _, case, dtype, _ = job
    for found in ranks:
        for theirs, ours in zip(reference(case, dtype), found["|".join(job)], strict=True):
            assert_close(theirs, ours, bound=BOUNDS[dtype])


def names(jobs):
    return [", ".join(part for part in job if part) for job in jobs]


HONEST_OF_TWO = [job for job in JOBS_OF_TWO if not job[3]]


@pytest.mark.parametrize("job", HONEST_OF_TWO, ids=names(HONEST_OF_TWO))
def test_two_ranks_equal_one_process(job, two, reference):
    check(job, two, reference)


@pytest.mark.soak
@pytest.mark.parametrize("job", JOBS_OF_THREE, ids=names(JOBS_OF_THREE))
def test_three_ranks_equal_one_process(job, three, reference):
    check(job, three, reference)


@pytest.mark.soak
@pytest.mark.parametrize("job", JOBS_OF_FOUR, ids=names(JOBS_OF_FOUR))
def test_four_ranks_equal_one_process(job, four, reference):
    check(job, four, reference)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_planted_bugs_are_caught_in_the_gradients(mutant, two, reference):
    job = (PLANS_OF_TWO[0], "gpt, shared key heads", "float32", mutant)
    theirs, ours = (
        {name: value for name, value in side.items() if name.startswith("grad/")}
        for side in (reference(job[1], job[2])[0], two[0]["|".join(job)][0])
    )
    assert compare(theirs, ours).worst > 1e-3
