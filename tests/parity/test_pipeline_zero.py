"""ZeRO under a cut model: two replicas, each with both stages, and microbatches in flight.

Gradients are bit for bit those of replicas that keep everything, and afterwards nothing is held.
"""

import pytest
import torch

from shoal.comm.mesh import build_mesh
from shoal.core.axes import Axis
from shoal.core.plan import Plan
from shoal.models.losses import cross_entropy
from shoal.parallel.analysis.analyse import analyse_module
from shoal.parallel.analysis.structure import ParallelConfig
from shoal.parallel.recompute import apply_recompute
from shoal.parallel.zero.apply import apply_zero
from shoal.pipeline.cut import StagedModule
from shoal.pipeline.deferred import DeferredGradients, defer_weight_gradients
from shoal.pipeline.units import find_units
from shoal.randomness.dropout import apply_keyed_dropout
from shoal.testing.ranks import run_on_ranks
from support.pipeline.stages_on_ranks import SEED, batch, build

# (zero, recompute, each stage in a model of its own that has let go of the other)
CASES = {
    "zero=2": (2, None, True),
    "zero=3": (3, None, True),
    "zero=3, both stages in one model": (3, None, False),
    "zero=3, recompute": (3, "full", False),
}
NUM_MICROBATCHES = 3
ORDER = ["F0", "F1", "B0", "F2", "W0", "B1", "W1", "B2", "W2"]


class Stage:
    """A model that holds some stages of two, sharded over the replicas."""

    def __init__(self, mesh, zero, recompute, stages):
        self.model, example = build("gpt"), batch("gpt", 0)[0]
        self.key = apply_keyed_dropout(self.model, SEED)
        analysis = analyse_module(self.model, example, ParallelConfig())
        units = find_units(self.model, example, analysis)
        if recompute is not None:
            apply_recompute(self.model, analysis=analysis, mode=recompute, dropout=self.key)
        place = [unit.path for unit in units].index("blocks.2")
        self.chain = StagedModule(self.model, units, [0, place], dropout=self.key)
        self.chain.settle(example)
        self.chain.keep(stages)
        self.reduction = apply_zero(
            self.model,
            analysis=analysis,
            mesh=mesh,
            stage=zero,
            num_microbatches=NUM_MICROBATCHES,
            placements={},
        )
        self.reduction.begin_step()


def begin(key, number):
    key.begin(0, range(4 * number, 4 * number + len(batch("gpt", number)[1])))
    return key.drawing()


def run_alone(mesh, numbers):
    """Plain replicas: the sum over microbatches, then over ranks."""
    model = build("gpt")
    key = apply_keyed_dropout(model, SEED)
    for number in numbers:
        inputs, targets = batch("gpt", number)
        with begin(key, number):
            output = model(*inputs)
        cross_entropy(output, targets).backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    for grad in grads.values():
        mesh.channel(Axis.DATA).all_reduce_(grad)
    return grads


def run_stages(mesh, numbers, zero, recompute, is_apart):
    homes = [Stage(mesh, zero, recompute, {stage} if is_apart else {0, 1}) for stage in ((0, 1) if is_apart else (0,))]
    ends, later = {}, {}
    for action in ORDER:
        microbatch = int(action[1])
        inputs, targets = batch("gpt", numbers[microbatch])
        if action[0] == "F":
            received, later[microbatch] = (), DeferredGradients()
            for stage in range(2):
                home = homes[stage if is_apart else 0]
                with begin(home.key, numbers[microbatch]), defer_weight_gradients(later[microbatch]):
                    output = home.chain.run(stage, inputs, received)
                outputs = list(output) if stage == 0 else [cross_entropy(output, targets)]
                ends[microbatch, stage] = (received, outputs)
                received = [tensor.detach().requires_grad_() for tensor in outputs]
        elif action[0] == "B":
            grads = None
            for stage in (1, 0):
                received, outputs = ends.pop((microbatch, stage))
                with homes[stage if is_apart else 0].reduction.microbatch(is_last=False):
                    torch.autograd.backward(outputs, grads)
                grads = [tensor.grad for tensor in received]
        else:
            later[microbatch].run()
    return homes


def differences(mesh, expected, home):
    """Rows of this rank that are not the expected ones, and whatever is still held."""
    home.reduction.finish()
    found = []
    for name, piece in home.reduction.updated.items():
        patches = home.reduction.placements[name].patches
        for patch in patches:
            rows = expected[name][tuple(slice(a, a + n) for a, n in zip(patch.whole_start, patch.shape, strict=True))]
            own = piece.grad[tuple(slice(a, a + n) for a, n in zip(patch.local_start, patch.shape, strict=True))]
            found += [] if torch.equal(rows, own) else [name]
    store = home.reduction.store
    if store is not None:
        found += ["held"] if any(store._holds) or store._saving else []
    found += [f"left {name}" for name, parameter in home.model.named_parameters() if parameter.grad is not None]
    return found


def compare(world):
    torch.set_num_threads(1)
    mesh = build_mesh(world, Plan.parse("dp=2"))
    numbers = [NUM_MICROBATCHES * world.rank + index for index in range(NUM_MICROBATCHES)]
    expected = run_alone(mesh, numbers)
    found = {}
    for case, (zero, recompute, is_apart) in CASES.items():
        homes = run_stages(mesh, numbers, zero, recompute, is_apart)
        found[case] = [name for home in homes for name in differences(mesh, expected, home)]
        world.barrier()
    mesh.close()
    return found


@pytest.fixture(scope="module")
def compared():
    return run_on_ranks(compare, 2, deadline_seconds=120.0)


@pytest.mark.parametrize("case", CASES)
def test_shards_of_a_cut_model_get_the_gradients_of_plain_replicas(case, compared):
    assert [by_case[case] for by_case in compared] == [[], []]
