"""Batch norm on two and three real processes against one: local mode in every bit, sync mode to 1e-12 in float64."""

import copy
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from shoal.comm.world import World
from shoal.core.errors import RequestError
from shoal.parallel.batchnorm import apply_batchnorm, begin_microbatch, fold
from shoal.testing.ranks import run_on_ranks

DEADLINE_SECONDS = 45.0
# Samples of each microbatch: CASES[name][replica][index]. Local replicas may have any number of them, sync ones equally many.
# Starting processes costs seconds and a scenario milliseconds, so two ranks (and then three) run all of theirs in one go.
LOCAL_CASES = {
    "even": [[3, 4], [4, 3]],
    "unequal": [[3, 4, 2], [5]],
    "idle": [[3, 4], []],
    "single": [[3, 1], [1, 4]],
    "three": [[3], [2, 2], [4, 3]],
}
SYNC_CASES = {
    "even": [[3, 4], [4, 3]],
    "unequal": [[5, 1], [2, 4]],
    "none": [[3, 4], [2, 0]],
    "only_one": [[0], [5]],
    "single": [[1], [0]],
    "three": [[3, 2], [0, 3], [1, 1]],
}
OPTIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "average": {"momentum": None},
    "bare": {"affine": False},
    "untracked": {"track_running_stats": False},
}


def build(options: dict[str, object], dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 5, 3),
        nn.BatchNorm2d(5, **options),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(20, 4),
        nn.BatchNorm1d(4, **options),
        nn.Linear(4, 3),
    ).to(dtype=dtype)
    # Weights of one and biases of zero would hide a forgotten one.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.rand_like(parameter))
    return model


def data(step: int, replica: int, index: int, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 100 * replica + index)
    x = torch.randn(size, 2, 4, 4, generator=generator, dtype=dtype) * (1 + replica) + index
    return x.requires_grad_(), torch.randn(size, 3, generator=generator, dtype=dtype)


def run_replica(world: World, mode: str, sizes: list[int], options: dict[str, object], name: str, twice: bool) -> dict:
    """Two steps on this replica; everything that can be compared with one process."""
    dtype = getattr(torch, name)
    model = build(options, dtype)
    apply_batchnorm(model, group=world.group, mode=mode)
    outputs, input_grads = [], []
    for step in range(2):
        for index, size in enumerate(sizes):
            begin_microbatch(model, index)
            x, weight = data(step, world.rank, index, size, dtype)
            if twice:
                model(x)
            y = model(x)
            (y * weight).sum().backward()
            outputs.append(y.detach())
            input_grads.append(x.grad)
        fold(model)
    model.eval()
    return {
        "outputs": outputs,
        "input_grads": input_grads,
        "grads": {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
        "buffers": dict(model.named_buffers()),
        "eval": model(data(9, 0, 0, 5, dtype)[0]).detach() if options.get("track_running_stats", True) else None,
    }


Scenario = tuple[str, str, str, str, bool]
"""Mode, case, option, type, and whether each forward pass runs twice."""
LOCAL: list[Scenario] = [
    ("local", "even", "plain", "float32", False),
    ("local", "even", "average", "float64", False),
    ("local", "unequal", "average", "float32", False),
    ("local", "idle", "plain", "float32", False),
    ("local", "unequal", "bare", "float32", False),
    ("local", "even", "untracked", "float32", False),
    ("local", "three", "plain", "float32", False),
]
SYNC: list[Scenario] = [
    ("sync", "even", "plain", "float64", False),
    ("sync", "unequal", "average", "float64", False),
    ("sync", "none", "plain", "float64", False),
    ("sync", "only_one", "bare", "float64", False),
    ("sync", "even", "untracked", "float64", False),
    ("sync", "three", "average", "float64", False),
]
TWICE: Scenario = ("local", "unequal", "average", "float32", True)
SINGLE: Scenario = ("local", "single", "plain", "float32", False)
SINGLE_SYNC: Scenario = ("sync", "single", "plain", "float64", False)
NOT_SYNC: Scenario = ("local", "even", "plain", "float64", False)
ALL = [*LOCAL, *SYNC, TWICE, SINGLE, SINGLE_SYNC, NOT_SYNC]


def case_of(scenario: Scenario) -> list[list[int]]:
    mode, case, *_ = scenario
    return LOCAL_CASES[case] if mode == "local" else SYNC_CASES[case]


def run_scenarios(world: World) -> dict[str, dict]:
    results = {}
    for scenario in ALL:
        mode, _, option, dtype, twice = scenario
        case = case_of(scenario)
        if len(case) == world.size:
            results[str(scenario)] = run_replica(world, mode, case[world.rank], OPTIONS[option], dtype, twice)
    return results


@pytest.fixture(scope="module")
def replicas():
    """The results of a scenario, by replica."""
    by_size = {size: run_on_ranks(run_scenarios, size, deadline_seconds=DEADLINE_SECONDS) for size in (2, 3)}

    def of(scenario: Scenario) -> list[dict]:
        return [results[str(scenario)] for results in by_size[len(case_of(scenario))]]

    return of


def sum_in_rank_order(results: list[dict]) -> dict[str, torch.Tensor]:
    total: dict[str, torch.Tensor] = {}
    for result in results:
        for name, grad in result["grads"].items():
            total[name] = total[name] + grad if name in total else grad
    return total


def one_process_local(case: list[list[int]], option: str, name: str) -> dict:
    """torch's own layer on all microbatches in global order; gradients are one partial sum per replica, added in rank order."""
    dtype = getattr(torch, name)
    model = build(OPTIONS[option], dtype)
    outputs: list[list[torch.Tensor]] = [[] for _ in case]
    partial: list[dict[str, torch.Tensor]] = [{} for _ in case]
    for step in range(2):
        for replica, sizes in enumerate(case):
            for index, size in enumerate(sizes):
                model.zero_grad()
                x, weight = data(step, replica, index, size, dtype)
                y = model(x)
                (y * weight).sum().backward()
                outputs[replica].append(y.detach())
                for key, p in model.named_parameters():
                    sums = partial[replica]
                    sums[key] = sums[key] + p.grad if key in sums else p.grad.clone()
    model.eval()
    return {
        "outputs": outputs,
        "grads": sum_in_rank_order([{"grads": sums} for sums in partial]),
        "buffers": dict(model.named_buffers()),
        "eval": model(data(9, 0, 0, 5, dtype)[0]).detach()
        if OPTIONS[option].get("track_running_stats", True)
        else None,
    }


def assert_buffers_are(buffers: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert buffers.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(buffers[name], tensor), name


@pytest.mark.parametrize("scenario", LOCAL, ids=str)
def test_local_replicas_have_the_bits_of_one_process(replicas, scenario):
    results = replicas(scenario)
    _, case, option, dtype, _ = scenario
    expected = one_process_local(LOCAL_CASES[case], option, dtype)
    for replica, result in enumerate(results):
        assert all(torch.equal(a, b) for a, b in zip(result["outputs"], expected["outputs"][replica], strict=True))
        assert_buffers_are(result["buffers"], expected["buffers"])
        if expected["eval"] is not None:
            assert torch.equal(result["eval"], expected["eval"])
    total = sum_in_rank_order(results)
    assert total.keys() == expected["grads"].keys()
    for name, grad in expected["grads"].items():
        assert torch.equal(total[name], grad), name


def test_a_forward_that_runs_twice_is_folded_once_on_replicas_too(replicas):
    once = ("local", "unequal", "average", "float32", False)
    for a, b in zip(replicas(once), replicas(TWICE), strict=True):
        assert_buffers_are(b["buffers"], a["buffers"])


def test_single_samples_on_replicas_end_no_run_and_agree(replicas):
    """The 1-sample microbatches go to BatchNorm1d with one value per channel, which torch's own layer refuses."""
    first, second = replicas(SINGLE)
    assert_buffers_are(first["buffers"], second["buffers"])
    assert int(first["buffers"]["1.num_batches_tracked"]) == 8
    assert int(first["buffers"]["5.num_batches_tracked"]) == 4
    assert all(torch.isfinite(tensor).all() for tensor in first["buffers"].values())


def one_process_sync(case: list[list[int]], option: str) -> dict:
    """torch's own layer, each microbatch the concatenation over replicas."""
    dtype = torch.float64
    model = build(OPTIONS[option], dtype)
    outputs: list[list[torch.Tensor]] = [[] for _ in case]
    input_grads: list[list[torch.Tensor]] = [[] for _ in case]
    for step in range(2):
        for index in range(len(case[0])):
            sizes = [replica[index] for replica in case]
            pairs = [data(step, replica, index, size, dtype) for replica, size in enumerate(sizes)]
            x = torch.cat([pair[0].detach() for pair in pairs]).requires_grad_()
            y = model(x)
            (y * torch.cat([pair[1] for pair in pairs])).sum().backward()
            for replica, (output, grad) in enumerate(zip(y.detach().split(sizes), x.grad.split(sizes), strict=True)):
                outputs[replica].append(output)
                input_grads[replica].append(grad)
    return {
        "outputs": outputs,
        "input_grads": input_grads,
        "grads": {name: p.grad for name, p in model.named_parameters()},
        "buffers": dict(model.named_buffers()),
    }


def assert_close(found: torch.Tensor, expected: torch.Tensor, scale: float) -> None:
    """The norm of the difference over the norm of the reference; ``scale`` stands in for a reference that is zero."""
    error = float((found - expected).norm()) / max(float(expected.norm()), scale)
    assert error <= 1e-12, error


@pytest.mark.parametrize("scenario", SYNC, ids=str)
def test_synchronised_replicas_equal_one_process_on_the_concatenated_batch(replicas, scenario):
    results = replicas(scenario)
    _, case, option, *_ = scenario
    expected = one_process_sync(SYNC_CASES[case], option)
    for replica, result in enumerate(results):
        for key in ("outputs", "input_grads"):
            for found, wanted in zip(result[key], expected[key][replica], strict=True):
                assert found.shape == wanted.shape
                assert_close(found, wanted, scale=1e-6)
        assert result["buffers"].keys() == expected["buffers"].keys()
        for name, tensor in expected["buffers"].items():
            assert_close(result["buffers"][name].double(), tensor.double(), scale=1e-6)
            assert torch.equal(result["buffers"][name], results[0]["buffers"][name]), name
    total = sum_in_rank_order(results)
    assert total.keys() == expected["grads"].keys()
    # The bias before a batch norm has a gradient of zero in exact arithmetic: it is noise, bounded by the whole gradient.
    whole = float(torch.cat([grad.reshape(-1) for grad in expected["grads"].values()]).norm())
    for name, grad in expected["grads"].items():
        assert_close(total[name], grad, scale=whole if name in ("0.bias", "4.bias") else 1e-9)


def test_synchronisation_is_not_local(replicas):
    """The comparison above must be able to fail: local statistics are not those of the concatenated batch."""
    result = replicas(NOT_SYNC)[0]
    expected = one_process_sync(SYNC_CASES["even"], "plain")
    difference = float((result["outputs"][0] - expected["outputs"][0][0]).norm() / expected["outputs"][0][0].norm())
    assert difference > 1e-2


def test_one_value_over_all_replicas_is_not_folded(replicas):
    first, second = replicas(SINGLE_SYNC)
    assert_buffers_are(first["buffers"], second["buffers"])
    assert int(first["buffers"]["1.num_batches_tracked"]) == 2
    assert int(first["buffers"]["5.num_batches_tracked"]) == 0
    assert all(torch.isfinite(tensor).all() for tensor in first["buffers"].values())


def recompute(world: World) -> dict:
    """Activations recomputed in the backward pass gather again, in the same order on every replica."""
    plain = build({}, torch.float64)
    recomputed = copy.deepcopy(plain)
    for model in (plain, recomputed):
        apply_batchnorm(model, group=world.group, mode="sync")
    for index in range(2):
        for model in (plain, recomputed):
            begin_microbatch(model, index)
            x, weight = data(0, world.rank, index, 3 + world.rank, torch.float64)
            y = model(x) if model is plain else checkpoint(model, x, use_reentrant=False)
            (y * weight).sum().backward()
    fold(plain)
    fold(recomputed)
    return {
        "state": all(torch.equal(a, b) for a, b in zip(plain.buffers(), recomputed.buffers(), strict=True)),
        "grads": all(
            torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), recomputed.parameters(), strict=True)
        ),
        "folds": int(recomputed[1].num_batches_tracked),
    }


def short_types(world: World) -> list[str]:
    found = []
    for dtype in (torch.bfloat16, torch.float16):
        model = build({}, torch.float32)
        apply_batchnorm(model, group=world.group, mode="sync")
        with torch.autocast("cpu", dtype=dtype):
            y = model(data(0, world.rank, 0, 4, torch.float32)[0])
        y.float().sum().backward()
        fold(model)
        assert all(torch.isfinite(p.grad).all() for p in model.parameters())
        found.append(f"{y.dtype} {model[1].running_mean.dtype} {model[1].weight.grad.dtype}")
    return found


def refuse(world: World) -> list[str]:
    messages = []
    for layer in (nn.SyncBatchNorm(3), nn.InstanceNorm2d(3, track_running_stats=True), nn.LazyBatchNorm2d()):
        try:
            apply_batchnorm(nn.Sequential(layer), group=world.group, mode="local")
        except RequestError as error:
            messages.append(str(error))
    apply_batchnorm(nn.Sequential(nn.InstanceNorm2d(3)), group=world.group, mode="local")
    return messages


def run_others(world: World) -> dict:
    return {"recompute": recompute(world), "short_types": short_types(world), "refuse": refuse(world)}


@pytest.fixture(scope="module")
def others():
    return run_on_ranks(run_others, 2, deadline_seconds=DEADLINE_SECONDS)


def test_recomputation_under_synchronisation_changes_no_bit_and_is_folded_once(others):
    assert [result["recompute"] for result in others] == [{"state": True, "grads": True, "folds": 2}] * 2


def test_synchronisation_under_autocast_keeps_statistics_in_float32(others):
    expected = ["torch.bfloat16 torch.float32 torch.float32", "torch.float16 torch.float32 torch.float32"]
    assert [result["short_types"] for result in others] == [expected] * 2


def test_layers_whose_statistics_would_drift_are_refused_by_name(others):
    for result in others:
        assert len(result["refuse"]) == 3
        assert all(message.startswith("layer '0' is a ") for message in result["refuse"])


def wait_for_nobody(world: World) -> float:
    """Rank 1 never normalises, and stays alive until rank 0 has given up: seconds that rank 0 waited."""
    # Making the group has the same short timeout, so the ranks start on it together.
    world.barrier()
    group = dist.new_group(timeout=timedelta(seconds=3))
    model = build({}, torch.float32)
    apply_batchnorm(model, group=group, mode="sync")
    waited = 0.0
    if world.rank == 0:
        started = time.monotonic()
        with pytest.raises(RuntimeError, match=r"(?i)timed out|timeout"):
            model(data(0, 0, 0, 3, torch.float32)[0])
        waited = time.monotonic() - started
    world.barrier()
    return waited


def test_a_peer_that_does_not_come_ends_the_wait_at_the_groups_timeout():
    waited, _ = run_on_ranks(wait_for_nobody, 2, deadline_seconds=DEADLINE_SECONDS)
    assert 2.9 <= waited < 30
