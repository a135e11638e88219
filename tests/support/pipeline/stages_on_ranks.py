"""Models cut into stages on real ranks, beside the same training in one process."""

from contextlib import contextmanager

import torch

from shoal.comm.trafficcounter import TrafficCounter
from shoal.data.spec import DataSpec
from shoal.models.build import build_model
from shoal.models.config import CnnConfig, GptConfig
from shoal.models.losses import cross_entropy
from shoal.parallel.analysis.analyse import analyse_module
from shoal.parallel.analysis.structure import ParallelConfig
from shoal.pipeline.cut import StagedModule
from shoal.pipeline.p2p import PointToPoint
from shoal.pipeline.runtime import Runtime
from shoal.pipeline.share import SharedGradients
from shoal.pipeline.units import find_units
from shoal.pipeline.versions import VersionRule, Versions
from shoal.randomness.dropout import apply_keyed_dropout
from shoal.schedules.catalogue import make_schedule
from shoal.schedules.schedule import Fold
from shoal.verify.oracle.delayed import Delay, Oracle

MICROBATCHES = 8
VOCAB, LENGTH = 33, 8
SEED = 7


def build(kind: str):
    torch.manual_seed(1)
    if kind == "cnn":
        return build_model(CnnConfig(dropout=0.1), DataSpec(kind="classes", features=(8, 8), classes=10))
    config = GptConfig(layers=4, hidden=16, heads=2, dropout=0.1, tied=kind == "tied gpt")
    model = build_model(config, DataSpec(kind="tokens", vocab=VOCAB, sequence=LENGTH))
    return with_seldom_used(model) if kind == "spare gpt" else model


def with_seldom_used(model):
    """A weight in the first block that nothing reads, and one that only a microbatch of one sample does."""
    block = model.blocks[0]
    block.spare, block.rare = (torch.nn.Parameter(torch.ones(16)) for _ in range(2))
    block.register_forward_hook(lambda module, args, output: output * module.rare if len(output) == 1 else output)
    return model


def batch(kind: str, microbatch: int):
    """The microbatch of this number, counted through all steps; the last of a step is shorter."""
    step, place = divmod(microbatch, MICROBATCHES)
    generator = torch.Generator().manual_seed(100 * step + place)
    size = 2 if place < MICROBATCHES - 1 else 1
    if kind == "cnn":
        images = torch.randn(size + 1, 8, 8, generator=generator)
        return (images,), torch.randint(10, (size + 1,), generator=generator)
    tokens = torch.randint(VOCAB, (size, LENGTH + 1), generator=generator)
    return (tokens[:, :-1].contiguous(),), tokens[:, 1:].contiguous()


class Feed:
    """Microbatches from number ``first`` on, with dropout by key."""

    def __init__(self, kind, key, first=0):
        self.kind_of_model, self.key, self.first = kind, key, first

    def inputs(self, microbatch):
        return batch(self.kind_of_model, self.first + microbatch)[0]

    def kind(self, microbatch):
        return tuple(tuple(tensor.shape) for tensor in self.inputs(microbatch))

    @contextmanager
    def drawing(self, microbatch):
        step, place = divmod(self.first + microbatch, MICROBATCHES)
        size = len(self.inputs(microbatch)[0])
        self.key.begin(step, range(4 * place, 4 * place + size))
        with self.key.drawing():
            yield

    def returning(self, microbatch):
        pass

    def loss(self, output, microbatch):
        return cross_entropy(output, batch(self.kind_of_model, self.first + microbatch)[1]) / MICROBATCHES


def adamw(parameters):
    return torch.optim.AdamW(list(parameters), lr=1e-2, fused=True)


def train_alone(kind: str, *, halves: bool, steps: int, turns=None):
    """Plain torch: gradients and weights of every step. Each half of the microbatches and each use of a tied weight has a sum.

    ``turns`` has by parameter on how many ranks each stage is that uses it: microbatches have a sum for each of them in turn.
    """
    model = build(kind)
    key = apply_keyed_dropout(model, SEED)
    parameters = dict(model.named_parameters())
    optimizer = adamw(parameters.values())
    uses = {"embedding.weight": ["embedding", "head"]} if kind == "tied gpt" else {}
    found = []
    for step in range(steps):
        feed = Feed(kind, key, first=step * MICROBATCHES)
        half = MICROBATCHES // 2 if halves else MICROBATCHES
        total = {}
        for start in range(0, 0 if turns else MICROBATCHES, half):
            for name, parts in _sums(model, feed, range(start, start + half), uses).items():
                for part in parts:
                    total[name] = total[name] + part if name in total else part
        if turns:
            total = _turned(model, feed, uses, turns)
        for name, parameter in parameters.items():
            parameter.grad = total.get(name)
        optimizer.step()
        found.append((total, {name: parameter.detach().clone() for name, parameter in parameters.items()}))
    return found


def _turned(model, feed, uses, turns):
    """The gradient with every rank's own microbatches summed first; then first ranks in the order of stages, then second ones."""
    counts = sorted({count for own in turns.values() for count in own})
    sums = {
        (count, turn): _sums(model, feed, range(turn, MICROBATCHES, count), uses)
        for count in counts
        for turn in range(count)
    }
    total = {}
    for name, own in turns.items():
        for turn in range(max(own)):
            for use, count in enumerate(own):
                parts = sums[count, turn][name] if turn < count else []
                for part in parts[use : use + 1]:
                    total[name] = total[name] + part if name in total else part
    return total


def _sums(model, feed, microbatches, uses):
    """By parameter, the gradient of each of its uses."""
    named = dict(model.named_parameters())
    # A weight of two layers becomes two for the pass, so that each use has a sum of its own.
    copies = {path: named[name].detach().clone().requires_grad_() for name, paths in uses.items() for path in paths}
    tied = {path: model.get_submodule(path).weight for path in copies}
    for path, copy in copies.items():
        model.get_submodule(path).weight = torch.nn.Parameter(copy)
    own = dict(model.named_parameters())
    for value in own.values():
        value.grad = None
    for microbatch in microbatches:
        with feed.drawing(microbatch):
            output = model(*feed.inputs(microbatch))
        feed.loss(output, microbatch).backward()
    found = {name: [] if value.grad is None else [value.grad.clone()] for name, value in own.items()}
    for path, weight in tied.items():
        model.get_submodule(path).weight = weight
    for name, paths in uses.items():
        found[name] = [part for path in paths for part in found.pop(f"{path}.weight")]
    return found


def cut(kind: str, num_stages: int):
    """The model as a chain of so many stages, and the key of its dropout."""
    model, example = build(kind), batch(kind, 0)[0]
    units = find_units(model, example, analyse_module(model, example, ParallelConfig()))
    places = [index for index, unit in enumerate(units) if unit.is_once]
    starts = [0, *(places[len(places) * stage // num_stages] for stage in range(1, num_stages))]
    key = apply_keyed_dropout(model, SEED)
    chain = StagedModule(model, units, starts, dropout=key)
    chain.settle(example)
    return chain, key


def train_in_stages(world, kind, schedule, references, *, steps, plant=None):
    """The first difference to one process on this rank, or None; all steps are taken, because the other ranks take them."""
    grid = schedule.grid
    chain, key = cut(kind, grid.num_stages)
    holders = chain.holders()
    own = chain.keep(grid.stages_of(world.rank))
    p2p = PointToPoint(world.group, traffic=TrafficCounter(), device=world.device, deadline_seconds=30.0)
    shared = SharedGradients(own, holders, grid=grid, rank=world.rank, p2p=p2p)
    runtime = Runtime(chain, schedule, rank=world.rank, p2p=p2p, sums=shared)
    if plant is not None:
        plant(runtime, world.rank)
    optimizer = adamw(own.values())
    reference, differences = references[grid.replicas or grid.fold is Fold.CROSS], []
    for step in range(steps):
        for parameter in own.values():
            parameter.grad = None
        runtime.step(Feed(kind, key, first=step * MICROBATCHES))
        shared.finish()
        grads, weights = reference[step]
        for name, parameter in own.items():
            found, expected = parameter.grad, grads.get(name)
            if (found is None) != (expected is None) or (found is not None and not torch.equal(found, expected)):
                differences.append(f"step {step}: gradient of {name}")
        optimizer.step()
        for name, parameter in own.items():
            if not torch.equal(parameter.detach(), weights[name]):
                differences.append(f"step {step}: weight {name}")
    return differences[0] if differences else None


def train_all(world, kind, names, steps):
    """What ``train_in_stages`` says of each schedule; refused ones are left out."""
    torch.set_num_threads(1)
    references = {halves: train_alone(kind, halves=halves, steps=steps) for halves in (False, True)}
    found = {}
    for name in names:
        schedule = make_schedule(name, ranks=world.size, microbatches=MICROBATCHES)
        found[name] = train_in_stages(world, kind, schedule, references, steps=steps)
        world.barrier()
    return found


def train_in_turns(world, kind, cases, steps, plant=None):
    """What ``train_in_stages`` says of each (schedule, ranks of every stage)."""
    torch.set_num_threads(1)
    found = {}
    for name, replicas in cases:
        holders = cut(kind, len(replicas))[0].holders()
        turns = {path: [replicas[stage] for stage in sorted(stages)] for path, stages in holders.items()}
        references = {tuple(replicas): train_alone(kind, halves=False, steps=steps, turns=turns)}
        schedule = make_schedule(name, ranks=world.size, microbatches=MICROBATCHES, replicas=replicas)
        difference = train_in_stages(world, kind, schedule, references, steps=steps, plant=plant)
        found["-".join([name, *map(str, replicas)])] = difference
        world.barrier()
    return found


def train_delayed(world, kind, name, windows, plant=None):
    """The first weight of this rank that is not the oracle's, after windows of steps with the pipeline drained between."""
    torch.set_num_threads(1)
    chain, key = cut(kind, world.size)
    stages = [[path for path, held in chain.holders().items() if stage in held] for stage in range(world.size)]
    own = chain.keep({world.rank})
    optimizer = adamw(own.values())
    p2p = PointToPoint(world.group, traffic=TrafficCounter(), device=world.device, deadline_seconds=30.0)
    versions, first = None, 0
    for steps in windows:
        schedule = make_schedule(name, ranks=world.size, microbatches=MICROBATCHES, steps=steps)
        if versions is None:
            rule = VersionRule(updates=schedule.updates, num_stages=world.size, accumulate=schedule.accumulate)
            versions = Versions(own, rule, stage=world.rank)
        runtime = Runtime(
            chain, schedule, rank=world.rank, p2p=p2p, versions=versions, update=lambda microbatch: optimizer.step()
        )
        if plant is not None:
            plant(runtime, world.rank)
        runtime.step(Feed(kind, key, first=first), first=first)
        first += steps * MICROBATCHES
    expected = ask_oracle(kind, name, stages, num_microbatches=first)
    return next((path for path, value in own.items() if not torch.equal(value.detach(), expected[path])), None)


def ask_oracle(kind, name, stages, *, num_microbatches):
    """The weights after so many microbatches by the papers' rule, in one process."""
    model = build(kind)
    key = apply_keyed_dropout(model, SEED)
    parameters = dict(model.named_parameters())
    feed = Feed(kind, key)

    def loss_of(run, microbatch):
        with feed.drawing(microbatch):
            output = run(*feed.inputs(microbatch))
        return feed.loss(output, microbatch)

    optimizers = [adamw(parameters[path] for path in paths) for paths in stages]
    oracle = Oracle(model, stages, Delay(name), optimizers, loss_of)
    each = MICROBATCHES if name == "pipedream-2bw" else 1
    for start in range(0, num_microbatches, each):
        oracle.take(range(start, start + each))
    return {path: value.detach() for path, value in parameters.items()}
