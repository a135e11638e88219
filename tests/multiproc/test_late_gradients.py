"""What becomes of late gradients, in whole runs of real processes: the events say how late each was and what it counted, and the
weights are those that the published formula gives for what the events say, and no others.

One of two workers is held while the other makes updates, so that some gradients are late by a known number of them.
"""

import numpy as np
import pytest
import torch

from shoal.data.order import own_microbatches, permute, position_of, take
from shoal.trainer.build import build_parts, load_run
from support.models.paced import allow
from support.paramserver.server_job import start_job as start_job
from support.processes.command import wait_until

pytestmark = pytest.mark.timeout(200)
STEPS, BATCH, SHARES, LATE, REMEMBERED = 12, 16, 2, 5, 8
AGES = [0, 0, 0, 0, 0, LATE, 1, *[0] * 16, 17]
RECIPE = """
[model]
build = "support.models.paced:build_rationed_digits"
args = {{ ration = "{ration}" }}
[data]
source = "digits"
[train]
steps = 12
global_batch = 16
threads = 1
seed = 3
precision = "float64"
[optim]
name = "sgd"
momentum = 0.0
weight_decay = 0.0
lr = 0.5
schedule = "constant"
[checkpoint]
every = 0
[telemetry]
tensorboard = false
[paramserver]
hang_after = 0
{setting}
"""


def train(start_job, tmp_path, setting):
    """Run with one setting; its updates in order, the training split, and the weights before and after.

    Who does what when is the test's doing, so every run makes the same updates from the same reads: five of worker-0, one of
    worker-1 that read before all of them, then worker-0 alone, and in the end one of worker-1 that is later than the servers
    remember weights.
    """
    ration = tmp_path / "ration"
    allow(ration, 0)
    run = start_job(plan="ps=2 workers=2 update=async", recipe=RECIPE.format(ration=ration, setting=setting))

    def wait_for_updates(count):
        wait_until(lambda: len(run.events("update")) >= count or run.process.poll() is not None, f"{count} updates", 90)

    # Both have taken a work unit and pulled the weights for it.
    wait_until(lambda: len(list(tmp_path.glob("worker-*.waits"))) == 2, "both workers", 90)
    allow(ration.with_name("worker-0"), LATE)
    wait_for_updates(LATE)
    allow(ration.with_name("worker-1"), 1)
    waits = tmp_path / "worker-1.waits"
    wait_until(lambda: waits.read_text() == "1", "worker-1 to have another work unit", 60)
    allow(ration.with_name("worker-0"), 1000)
    wait_for_updates(STEPS * SHARES - 1)
    allow(ration.with_name("worker-1"), 1000)
    run.end()
    updates = sorted(run.events("update"), key=lambda event: event["update"])
    assert [event["update"] for event in updates] == list(range(STEPS * SHARES))
    assert [event["staleness"] for event in updates] == [[age] for age in AGES], updates
    assert [event["workers"] for event in updates if event["staleness"][0] > 1] == [["worker-1"]] * 2
    loaded = load_run(run.run_dir)
    before, _, data = build_parts(loaded.recipe)
    return updates, data.train, dict(before.double().named_parameters()), dict(loaded.model.double().named_parameters())


def gradient(weights, source, unit):
    """The mean over a work unit's own samples, by plain autograd."""
    step, share = divmod(unit, SHARES)
    position = position_of(step, len(source), BATCH)
    span, _ = take(position, len(source), BATCH)
    ids = permute(3, position.epoch, len(source), np.arange(span.start, span.stop, dtype=np.int64))
    (own,) = own_microbatches(ids, share, SHARES, 1)
    items = source.collate(own)
    weight, bias = (weights[name].detach().clone().requires_grad_() for name in ("2.weight", "2.bias"))
    logits = items.inputs[0].double().flatten(1) @ weight.T + bias
    torch.nn.functional.cross_entropy(logits, items.targets).backward()
    return {"2.weight": weight.grad, "2.bias": bias.grad}


def replay(updates, source, before, *, size, correct):
    """The weights that the updates make, by the formulas that are given."""
    versions = [{name: tensor.detach().clone() for name, tensor in before.items()}]
    for event in updates:
        (units,), (read,) = event["units"], event["read"]
        (unit,), now = units, versions[-1]
        found = gradient(versions[read], source, unit)
        known = versions[max(read, event["update"] - REMEMBERED)]
        corrected = {name: correct(found[name], now[name], known[name]) for name in now}
        versions.append({name: now[name] - size(event) * corrected[name] for name in now})
    return versions[-1]


@torch.no_grad()
def distance(one, other):
    """Relative, over all parameters."""
    apart = sum(float((one[name] - other[name]).square().sum()) for name in one)
    return (apart / sum(float(tensor.square().sum()) for tensor in one.values())) ** 0.5


def plain(gradient, now, read):
    return gradient


def by_rate(event):
    return event["lr"]


def test_delay_compensation_is_in_effect(start_job, tmp_path):
    """Zheng et al. 2017, "Asynchronous Stochastic Gradient Descent with Delay Compensation": g + lambda g g (w_now - w_read)."""
    updates, source, before, after = train(start_job, tmp_path, "delay_compensation = 2.0")
    assert all(event["step_sizes"] == [event["lr"]] for event in updates)

    def compensated(gradient, now, read):
        return gradient + 2.0 * gradient * gradient * (now - read)

    assert distance(after, replay(updates, source, before, size=by_rate, correct=compensated)) < 1e-12
    assert distance(after, replay(updates, source, before, size=by_rate, correct=plain)) > 1e-6, "it changes nothing"


def test_a_step_is_divided_by_the_staleness_of_its_gradient(start_job, tmp_path):
    """Zhang et al. 2016, "Staleness-aware Async-SGD for Distributed Deep Learning": lr / max(1, tau)."""
    updates, source, before, after = train(start_job, tmp_path, "staleness_aware = true")
    for event in updates:
        (staleness,), (read,) = event["staleness"], event["read"]
        assert staleness == event["update"] - read
        assert event["step_sizes"] == [event["lr"] / max(1, staleness)]
    assert [updates[LATE]["step_sizes"], updates[-1]["step_sizes"]] == [[0.5 / LATE], [0.5 / 17]]

    def aware(event):
        return event["lr"] / max(1, event["update"] - event["read"][0])

    assert distance(after, replay(updates, source, before, size=aware, correct=plain)) < 1e-12
    assert distance(after, replay(updates, source, before, size=by_rate, correct=plain)) > 1e-6, "it changes nothing"


@pytest.mark.soak
def test_without_either_a_late_gradient_counts_as_any_other(start_job, tmp_path):
    updates, source, before, after = train(start_job, tmp_path, "")
    assert all(event["step_sizes"] == [event["lr"]] for event in updates)
    assert distance(after, replay(updates, source, before, size=by_rate, correct=plain)) < 1e-12
