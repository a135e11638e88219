"""Stages of a model that other techniques have laid out: two ranks run all of them, each stage in a module of its own that has
let go of the others, with two microbatches in flight. Gradients and traffic are those of the same model uncut, bit for bit.
"""

import pytest
import torch
from torch import nn

from shoal.comm.mesh import build_mesh
from shoal.core.plan import Plan
from shoal.parallel.apply import apply_to_model
from shoal.pipeline.cut import StagedModule
from shoal.pipeline.units import find_units
from shoal.randomness.dropout import apply_keyed_dropout
from shoal.testing.ranks import run_on_ranks
from support.models.tensor_parallel import BATCH, batch_of, build

CASES = {
    "tp": ("tp=2 recompute=selective", ["blocks.1", "norm"]),
    "sp": ("tp=2 sp=true recompute=full", ["blocks.1", "norm"]),
    "sp, at the first block": ("tp=2 sp=true", ["blocks.0", "head"]),
    "cp": ("cp=2", ["blocks.1", "norm"]),
}


class ModelLayout:
    """One model under a plan, cut or not."""

    def __init__(self, mesh, plan, places, stage=None):
        self.model, analysis = build("gpt dropout", torch.float32)
        # A dropout after the last block, which under cp sees some positions there and all of them before the first.
        self.model.norm = nn.Sequential(self.model.norm, nn.Dropout(0.1))
        self.key = apply_keyed_dropout(self.model, 3)
        example = tuple(batch_of("gpt", 0, torch.float32)[0])
        units = find_units(self.model, example, analysis)
        apply_to_model(self.model, plan=plan, mesh=mesh, analysis=analysis, dropout=self.key, batch_norm="local")
        if stage is not None:
            paths = [unit.path for unit in units]
            starts = [0, *(next(n for n, path in enumerate(paths) if path.startswith(place)) for place in places)]
            self.chain = StagedModule(self.model, units, starts, dropout=self.key)
            self.chain.settle(example)
            self.chain.keep({stage})

    def begin(self, microbatch):
        self.key.begin(0, range(BATCH * microbatch, BATCH * (microbatch + 1)))
        return self.key.drawing()


def inputs_of(microbatch):
    return batch_of("gpt", microbatch, torch.float32)[0]


def loss_of(output):
    # Any scalar will do; what crosses is the model's affair.
    return output.square().mean()


def run_whole(mesh, plan):
    laid = ModelLayout(mesh, plan, ())
    with mesh.traffic.counting() as counts:
        for microbatch in range(2):
            with laid.begin(microbatch):
                output = laid.model(*inputs_of(microbatch))
            loss_of(output).backward()
    return dict(laid.model.named_parameters()), counts


def run_stages(mesh, plan, places):
    stages = [ModelLayout(mesh, plan, places, stage) for stage in range(len(places) + 1)]
    ends = {}
    with mesh.traffic.counting() as counts:
        for microbatch in range(2):
            received = ()
            for stage, laid in enumerate(stages):
                with laid.begin(microbatch):
                    out = laid.chain.run(stage, inputs_of(microbatch), received)
                is_last = stage == len(places)
                ends[microbatch, stage] = (received, [loss_of(out)] if is_last else list(out))
                received = () if is_last else [tensor.detach().requires_grad_() for tensor in out]
        for microbatch in range(2):
            grads = None
            for stage in reversed(range(len(stages))):
                received, outputs = ends[microbatch, stage]
                torch.autograd.backward(outputs, grads)
                grads = [tensor.grad for tensor in received]
    return {name: value for laid in stages for name, value in laid.model.named_parameters()}, counts


def compare(world):
    """By case, what differs: names of gradients, and the traffic."""
    torch.set_num_threads(1)
    found, meshes = {}, {}
    for case, (text, places) in CASES.items():
        plan = Plan.parse(f"dp=1 {text}")
        axis = text.split()[0]
        if axis not in meshes:
            meshes[axis] = build_mesh(world, plan)
        (expected, counts), (own, counted) = run_whole(meshes[axis], plan), run_stages(meshes[axis], plan, places)
        names = [name for name in expected if not torch.equal(expected[name].grad, own[name].grad)]
        missing = sorted(expected.keys() ^ own.keys())
        found[case] = [*names, *missing, *([] if counts == counted else [f"{counts} != {counted}"])]
        world.barrier()
    for mesh in meshes.values():
        mesh.close()
    return found


@pytest.fixture(scope="module")
def compared():
    return run_on_ranks(compare, 2, deadline_seconds=240.0)


@pytest.mark.parametrize("case", CASES)
def test_stages_give_the_gradients_and_the_traffic_of_the_model_that_is_not_cut(case, compared):
    assert [by_case[case] for by_case in compared] == [[], []]
