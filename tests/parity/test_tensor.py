"""Tensor and sequence parallelism against one process that imports nothing of ``parallel/``.

The reference runs plain torch on the plain model. Ranks return their pieces; the pieces are put together by their placements and
compared with the reference: loss, every gradient, norm, weights and optimizer state, over three steps.
"""

import functools

import pytest
import torch

from shoal.comm.full_tensor import put_local
from shoal.comm.mesh import build_mesh
from shoal.core.axes import Axis
from shoal.core.placement import Patch, Placement, place_whole
from shoal.core.plan import Plan
from shoal.models.losses import cross_entropy
from shoal.parallel.dropout import narrow_dropouts
from shoal.parallel.recompute import apply_recompute
from shoal.parallel.tensor import layers as split_layers
from shoal.parallel.tensor import vocabulary
from shoal.parallel.tensor.apply import apply_tensor_parallel
from shoal.parallel.tensor.crossing import leave_sequence
from shoal.parallel.tensor.traffic_forecast import forecast_traffic, record_crossings
from shoal.parallel.tensor.vocabulary import split_cross_entropy
from shoal.randomness.dropout import apply_keyed_dropout
from shoal.testing.parity import compare
from shoal.testing.ranks import run_on_ranks
from support.models.tensor_parallel import BATCH, BUILDERS, STEPS, batch_of, build

# bfloat16 keeps 8 bits, so each rounding is off by at most 2^-8. A value of the two blocks goes through some 16 roundings of
# activations on its way forward and as many on the way back, and they add up as independent errors do: 2^-8 * sqrt(32) = 2.2%.
# The two sides round in different places, so twice that; a wrong factor of tp or a lost sum is 50% or more.
BOUNDS = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 2 * 2**-8 * 32**0.5}
PLAIN = [(case, "float64", False) for case in BUILDERS]
CUT = [(case, "float64", True) for case in BUILDERS if case != "mlp"]
SINGLE = [
    (case, "float32", is_cut) for case in ("gpt gqa", "gpt tied 67", "seq2seq", "fused") for is_cut in (False, True)
]
HALF = [("gpt gqa", "bfloat16", False), ("fused", "bfloat16", True), ("gpt 65", "bfloat16", True)]
AGAIN = [
    ("gpt dropout", "float64", False, "full"),
    ("gpt dropout", "float64", True, "selective"),
    ("seq2seq", "float64", True, "full"),
    ("gpt", "float64", False, "selective"),
    ("encoder (L, B)", "float64", True, "full"),
    ("fused", "float64", True, "selective"),
]
MUTANTS = {
    "row sum dropped": ("gpt", "float64", False),
    "input gradient not summed": ("gpt", "float64", False),
    "gradient times tp": ("gpt", "float64", False),
    "padded vocabulary in the loss": ("gpt 65", "float64", False),
    "norm weight not summed": ("gpt", "float64", True),
    "gradients of other ranks' outputs dropped": ("seq2seq", "float64", True),
}


def snapshot(model, optimizer, loss):
    found = {"loss": loss.detach().double().reshape(1)}
    for name, parameter in model.named_parameters():
        found[f"grad/{name}"] = parameter.grad.clone()
        found[f"weight/{name}"] = parameter.detach().clone()
        for key, value in optimizer.state[parameter].items():
            if key != "step":
                found[f"optimizer/{name}/{key}"] = value.clone()
    return found


def make_optimizer(model, case, dtype):
    """Adam divides by the gradient's own size, and so makes steps of a whole learning rate out of rounding errors.

    In float32 a few elements of a thousand have such gradients, and the gradient of a key's bias is nothing else: softmax does
    not see it. There the optimizer is linear in the gradient, and errors stay the size that they have.
    """
    if dtype == "float64" and case not in ("fused", "encoder", "encoder (L, B)"):
        return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, weight_decay=0.1, fused=True)


def autocast(dtype):
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16")


def weights_of(dtype):
    return torch.float32 if dtype == "bfloat16" else getattr(torch, dtype)


@functools.cache
def reference(case, dtype):
    torch.set_num_threads(1)
    model, _ = build(case, weights_of(dtype))
    key = apply_keyed_dropout(model, 3)
    optimizer, found = make_optimizer(model, case, dtype), []
    for step in range(STEPS):
        inputs, targets = batch_of(case, step, weights_of(dtype))
        optimizer.zero_grad()
        key.begin(step, range(BATCH))
        with autocast(dtype):
            loss = cross_entropy(model(*inputs), targets)
        loss.backward()
        optimizer.step()
        found.append(snapshot(model, optimizer, loss))
    return found


def run_jobs(world, jobs, mutants):
    """The real path on one rank: every job, then each bug planted in it."""
    mesh = build_mesh(world, Plan(dp=1, tp=world.size))
    found = [run_split(mesh, *job) for job in jobs]
    for name in mutants:
        undo = plant(name)
        found.append(run_split(mesh, *MUTANTS[name], skip_partial=name == "norm weight not summed"))
        undo()
    return found


def run_split(mesh, case, dtype, sequence_parallel, recompute="none", skip_partial=False):
    model, analysis = build(case, weights_of(dtype))
    plan = Plan(dp=1, tp=mesh.degree(Axis.TENSOR), sp=sequence_parallel, recompute=recompute)
    survey = record_crossings(model, analysis, batch_of(case, 0, weights_of(dtype))[0])
    key = apply_keyed_dropout(model, 3)
    layout = apply_tensor_parallel(model, analysis=analysis, mesh=mesh, sequence_parallel=sequence_parallel)
    narrow_dropouts(key, analysis=analysis, mesh=mesh, plan=plan)
    if recompute != "none":
        apply_recompute(model, analysis=analysis, mode=recompute, dropout=key)
    channel = mesh.channel(Axis.TENSOR)
    optimizer, found = make_optimizer(model, case, dtype), []
    for step in range(STEPS):
        inputs, targets = batch_of(case, step, weights_of(dtype))
        optimizer.zero_grad()
        key.begin(step, range(BATCH))
        with mesh.traffic.counting() as counted:
            with autocast(dtype):
                output = model(*inputs)
                if layout.splits_logits:
                    loss = split_cross_entropy(output, targets, channel=channel, vocab=layout.vocab)
                else:
                    loss = cross_entropy(output, targets)
            loss.backward()
        for name, parameter in model.named_parameters():
            if name in layout.partial and not skip_partial:
                channel.all_reduce_(parameter.grad)
        optimizer.step()
        found.append(snapshot(model, optimizer, loss))
    placements = {name: pack(placement) for name, placement in layout.placements.items()}
    weight_bytes = weights_of(dtype).itemsize
    expected = forecast_traffic(
        survey,
        plan,
        batch=BATCH,
        compute_bytes=2 if dtype == "bfloat16" else weight_bytes,
        weight_bytes=weight_bytes,
        num_targets=targets.numel() if layout.splits_logits else None,
    )
    all_counts = [
        sorted([*key, traffic.calls, traffic.num_bytes] for key, traffic in counts.items())
        for counts in (counted, expected)
    ]
    return {"steps": found, "placements": placements, "partial": sorted(layout.partial), "traffic": all_counts}


def pack(placement):
    patches = [[list(p.local_start), list(p.whole_start), list(p.shape)] for p in placement.patches]
    return [list(placement.whole_shape), list(placement.local_shape), patches]


def unpack(packed):
    patches = tuple(Patch(local_start=tuple(a), whole_start=tuple(b), shape=tuple(c)) for a, b, c in packed[2])
    return Placement(whole_shape=tuple(packed[0]), local_shape=tuple(packed[1]), patches=patches)


def put_together(by_rank, step):
    """Whole tensors from the ranks' pieces; what several ranks hold must be the same bits on all of them."""
    whole = {}
    for result in by_rank:
        for key, local in result["steps"][step].items():
            name = key.split("/")[1] if "/" in key else key
            packed = result["placements"].get(name)
            placement = place_whole(local.shape) if packed is None else unpack(packed)
            if key not in whole:
                whole[key] = torch.full(placement.whole_shape, torch.nan, dtype=local.dtype)
            elif packed is None:
                assert torch.equal(whole[key], local), f"{key} differs between ranks"
            put_local(local, whole[key], placement)
    return whole


def worst_error(case, dtype, by_rank):
    """The worst error over steps and kinds, with the name of the tensor."""
    worst = (0.0, None)
    for step, expected in enumerate(reference(case, dtype)):
        found = put_together(by_rank, step)
        for kind in ("loss", "grad", "weight", "optimizer"):
            ours = {key: value for key, value in found.items() if key.startswith(kind)}
            theirs = {key: value for key, value in expected.items() if key.startswith(kind)}
            comparison = compare(theirs, ours)
            worst = max(worst, (comparison.worst, comparison.worst_name), key=lambda pair: pair[0])
        norms = [
            sum(float(v.double().square().sum()) for k, v in side.items() if k.startswith("grad")) ** 0.5
            for side in (expected, found)
        ]
        worst = max(worst, (abs(norms[1] / norms[0] - 1), "norm"), key=lambda pair: pair[0])
    return worst


def plant(name):
    """Break the real path of this process; the returned function mends it."""
    saved = [
        (split_layers, "sum_out"),
        (split_layers, "copy_in"),
        (vocabulary, "_real_scores"),
        (split_layers, "gather_sequence"),
    ]
    saved = [(owner, key, getattr(owner, key)) for owner, key in saved]
    if name == "row sum dropped":
        split_layers.sum_out = lambda x, channel: x
    elif name == "input gradient not summed":
        split_layers.copy_in = lambda x, channel: x
    elif name == "gradient times tp":
        honest = split_layers.copy_in
        # The same value, and a gradient that is tp times too large on every rank alike.
        split_layers.copy_in = lambda x, channel: honest(x * channel.size - (x * (channel.size - 1)).detach(), channel)
    elif name == "padded vocabulary in the loss":
        vocabulary._real_scores = lambda scores, targets, channel, vocab: (
            scores.flatten(0, 1),
            targets.flatten(),
            channel.rank * scores.shape[-1],
        )
    elif name == "gradients of other ranks' outputs dropped":
        split_layers.gather_sequence = leave_sequence

    def undo():
        for owner, key, value in saved:
            setattr(owner, key, value)

    return undo


# On four ranks the cases in which the number of ranks matters: padding over several ranks, one head each, finer cuts.
JOBS = {
    2: PLAIN + CUT + SINGLE + HALF + AGAIN,
    4: [
        ("gpt 65", "float64", False),
        ("gpt tied 67", "float64", True),
        ("seq2seq", "float64", True),
        ("encoder (L, B)", "float64", True),
        ("fused", "float32", True),
    ],
}


class Results(dict):
    def __missing__(self, num_ranks):
        planted = list(MUTANTS) if num_ranks == 2 else []
        jobs = [list(job) for job in JOBS[num_ranks]]
        self[num_ranks] = run_on_ranks(run_jobs, num_ranks, jobs, planted, deadline_seconds=110)
        return self[num_ranks]


@pytest.fixture(scope="module")
def results():
    """By number of ranks: every job's pieces, then every mutant's. Ranks start when they are first asked for."""
    return Results()


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_equals_one_process(results, num_ranks):
    errors = {}
    for number, (case, dtype, *options) in enumerate(JOBS[num_ranks]):
        error, name = worst_error(case, dtype, [result[number] for result in results[num_ranks]])
        if error > BOUNDS[dtype]:
            errors[case, dtype, *options] = (error, name)
    assert not errors


@pytest.mark.parametrize("mutant", list(MUTANTS))
def test_planted_bug_is_caught(results, mutant):
    case, dtype, _ = MUTANTS[mutant]
    number = len(JOBS[2]) + list(MUTANTS).index(mutant)
    by_rank = [result[number] for result in results[2]]
    try:
        error, _ = worst_error(case, dtype, by_rank)
    except AssertionError:
        return  # Ranks that should hold the same hold different bits.
    assert error > 1e-4


def test_partial_names_are_the_whole_parameters_of_the_blocks(results):
    number = JOBS[2].index(("gpt", "float64", True))
    expected = {f"blocks.{i}.{name}_norm.weight" for i in range(2) for name in ("attention", "feed_forward")}
    assert set(results[2][0][number]["partial"]) == expected
    assert results[2][0][JOBS[2].index(("gpt", "float64", False))]["partial"] == []


@pytest.mark.soak
def test_padded_rows_are_in_no_patch_and_stay_zero(results):
    number = JOBS[4].index(("gpt 65", "float64", False))
    last = results[4][3][number]
    assert last["placements"]["head.weight"] == [[65, 32], [17, 32], [[[0, 0], [51, 0], [14, 32]]]]
    for step in last["steps"]:
        assert not step["grad/head.weight"][14:].any() and not step["weight/head.weight"][14:].any()


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_traffic_is_what_the_plan_should_cost(results, num_ranks):
    different = {}
    for number, job in enumerate(JOBS[num_ranks]):
        counted, expected = results[num_ranks][0][number]["traffic"]
        if counted != expected or not counted:
            different[job] = (counted, expected)
    assert not different


def test_lost_collective_shows_in_the_traffic(results):
    counted, expected = results[2][0][len(JOBS[2]) + list(MUTANTS).index("input gradient not summed")]["traffic"]
    assert counted != expected
