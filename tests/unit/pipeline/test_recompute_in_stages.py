"""Recomputed blocks in stages, with several microbatches in flight: the gradients of the module that keeps everything."""

import pytest
import torch

from shoal.models.losses import cross_entropy
from shoal.parallel.analysis.analyse import analyse_module
from shoal.parallel.analysis.structure import ParallelConfig
from shoal.parallel.recompute import apply_recompute
from shoal.pipeline.cut import StagedModule
from shoal.pipeline.deferred import DeferredGradients, defer_weight_gradients
from shoal.pipeline.units import find_units
from shoal.randomness.dropout import apply_keyed_dropout
from support.pipeline.stages_on_ranks import SEED, batch, build

# The last microbatch is shorter than the others.
MICROBATCHES = (5, 6, 7)
ORDER = ["F0", "F1", "B0", "F2", "B1", "W0", "B2", "W2", "W1"]


def begin(key, microbatch):
    key.begin(1, range(4 * microbatch, 4 * microbatch + len(batch("gpt", microbatch)[1])))
    return key.drawing()


def autocast(dtype):
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16")


def gradients_alone(dtype, weights=None):
    model = build("gpt")
    key = apply_keyed_dropout(model, SEED)
    for microbatch in MICROBATCHES:
        if weights is not None:
            model.load_state_dict(weights[microbatch], strict=False)
        inputs, targets = batch("gpt", microbatch)
        with begin(key, microbatch), autocast(dtype):
            output = model(*inputs)
        cross_entropy(output, targets).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


class Rank:
    """Both stages of a model in one process, each pass by itself."""

    def __init__(self, recompute):
        self.model, example = build("gpt"), batch("gpt", 0)[0]
        self.key = apply_keyed_dropout(self.model, SEED)
        analysis = analyse_module(self.model, example, ParallelConfig())
        units = find_units(self.model, example, analysis)
        if recompute is not None:
            apply_recompute(self.model, analysis=analysis, mode=recompute, dropout=self.key)
        place = [unit.path for unit in units].index("blocks.2")
        self.chain = StagedModule(self.model, units, [0, place], dropout=self.key)
        self.chain.settle(example)
        self.ends, self.later = {}, {}

    def forward(self, microbatch, dtype, weights=None):
        inputs, targets = batch("gpt", microbatch)
        received = ()
        self.later[microbatch] = later = DeferredGradients()
        for stage in range(2):
            with begin(self.key, microbatch), autocast(dtype), defer_weight_gradients(later):
                output = self.chain.run(stage, inputs, received, weights)
            if stage == 0:
                self.ends[microbatch, 0] = (received, list(output))
                received = [tensor.detach().requires_grad_() for tensor in output]
            else:
                self.ends[microbatch, 1] = (received, [cross_entropy(output, targets)])

    def backward(self, microbatch):
        grads = None
        for stage in (1, 0):
            received, outputs = self.ends.pop((microbatch, stage))
            torch.autograd.backward(outputs, grads)
            grads = [tensor.grad for tensor in received]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_a_backward_pass_in_two_parts_gives_the_same_bits(recompute, dtype):
    """The weights' part comes later, in the order of microbatches it has in the sum."""
    rank = Rank(recompute)
    for action in ORDER:
        microbatch = MICROBATCHES[int(action[1])]
        if action[0] == "F":
            rank.forward(microbatch, dtype)
        elif action[0] == "B":
            rank.backward(microbatch)
    for microbatch in MICROBATCHES:
        rank.later[microbatch].run()
    for name, expected in gradients_alone(dtype).items():
        assert torch.equal(rank.model.get_parameter(name).grad, expected), name


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_a_recompute_reads_the_version_of_its_microbatch(recompute):
    rank = Rank(recompute)
    versions = {
        microbatch: {
            name: (parameter.detach() * (1 + number)).requires_grad_()
            for name, parameter in rank.model.named_parameters()
        }
        for number, microbatch in enumerate(MICROBATCHES)
    }
    for microbatch in MICROBATCHES:
        rank.forward(microbatch, "float32", versions[microbatch])
    for microbatch in MICROBATCHES:
        rank.backward(microbatch)
        rank.later[microbatch].run()
    total = {
        name: sum(versions[microbatch][name].grad for microbatch in MICROBATCHES) for name in versions[MICROBATCHES[0]]
    }
    for name, expected in gradients_alone("float32", versions).items():
        assert torch.equal(total[name], expected), name
