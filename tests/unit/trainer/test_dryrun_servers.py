"""A dry run says what a server and a worker will hold: compared with the storages of real ones, which talk to nobody."""

import asyncio
import gc
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from shoal.core.plan import Plan
from shoal.engine.resolve import choose_plan
from shoal.optim.precision import Precision
from shoal.paramserver.config import pulls_ahead
from shoal.paramserver.lbfgs.algorithm import LbfgsSettings, begin, iterate
from shoal.paramserver.programs import GRADIENT, WEIGHTS
from shoal.paramserver.records import PushId, WorkUnit
from shoal.paramserver.server.memory import sizes_with_servers
from shoal.paramserver.server.replica import Replica
from shoal.paramserver.worker import own_steps as local
from shoal.paramserver.worker.flat import describe_model
from shoal.serverrun.server.source import ShardSource
from shoal.serverrun.worker.process import build_worker, choose_loop
from shoal.trainer.build import build_parts
from shoal.trainer.dryrun import describe_dry_run, dry_run_result
from shoal.trainer.own_parts import OwnPartsHere
from shoal.trainer.request import TrainRequest, prepare
from support.paramserver.lbfgs_problems import LocalVectors, rugged
from support.paramserver.run_in_process import DIGITS, place_in, recipe_of
from support.paramserver.updates import make_update

BASE = {**DIGITS, "model": {"name": "mlp", "hidden": 256}}
SMALL = 0.03
"""What batches and activations may add, as a part of the model."""


@pytest.fixture(autouse=True)
def _others_tensors_are_not_counted():
    """What earlier tests left in this process is not seen by ``live_bytes``, whether it goes meanwhile or stays."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def live_bytes() -> int:
    """Of every storage that a tensor of this test has."""
    gc.collect()
    # By its type: some objects of torch answer the question of their class with a warning.
    tensors = [one for one in gc.get_objects() if type(one) in (Tensor, nn.Parameter) and one.device.type == "cpu"]
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


def foretell(text, *settings):
    plan = choose_plan("dp=1", plan_text=text, num_processes=None)
    recipe = recipe_of(*settings, base=BASE)
    model, _, _ = build_parts(recipe)
    model = model.to(Precision.named(recipe.train.precision).weight_dtype)
    fixed = sum(buffer.nbytes for buffer in model.buffers())
    return (
        sizes_with_servers(
            describe_model(model),
            plan,
            config=recipe.paramserver,
            optim=recipe.optim,
            global_batch=recipe.train.global_batch,
            part={},
            fixed=fixed,
        ),
        plan,
        recipe,
    )


class Server:
    """The first server of a run: its source, its own shard and those that it backs up."""

    def __init__(self, folder, plan: Plan, recipe) -> None:
        self.source = ShardSource(place_in(folder, "server", 0, plan, recipe))
        self.module_bytes = sum(one.nbytes for one in self.source.module.state_dict().values())
        self.before = live_bytes()
        self.states = [self.source.make_shard((0 - behind) % plan.ps) for behind in range(plan.backup + 1)]

    def push(self, number: int) -> PushId:
        identity = PushId(f"worker-{number}", number)
        for state in self.states:
            state.store(identity, torch.ones_like(state.weights), state.version)
        return identity

    @property
    def held(self) -> int:
        return self.module_bytes + live_bytes() - self.before


@pytest.mark.parametrize(
    ("plan", "optimizer", "num_waiting"),
    [
        ("ps=2 workers=3 update=bsp", "adamw", 3),
        ("ps=2 workers=3 update=bsp backup=1", "torch.optim.NAdam", 3),
        ("ps=2 workers=2 update=ssp:2 backup=1", "momentum", 6),
    ],
)
def test_a_server_holds_what_is_said_when_every_push_waits(tmp_path, plan, optimizer, num_waiting):
    said, parsed, recipe = foretell(plan, f"optim.name={optimizer}")
    server = Server(tmp_path, parsed, recipe)
    for number in range(num_waiting):
        server.push(number)
    in_place = said.server["weights"] + said.server["gradients"] + said.server["optimizer"]
    assert server.held == in_place
    assert (said.server["working"] == 0) is ("bsp" in plan)


def test_weights_that_are_read_while_they_change_are_there_twice(tmp_path):
    said, parsed, recipe = foretell("ps=1 workers=1 update=async", "optim.name=adamw")

    async def work():
        server = Server(tmp_path, parsed, recipe)
        replica = Replica(server.states[0])
        async with replica.lock:
            reading = replica.read_snapshot()
            reading.__enter__()
        await replica.change(lambda: None)
        server.push(0)
        held = server.held
        reading.__exit__(None, None, None)
        return held

    assert asyncio.run(work()) == sum(said.server.values())


def test_old_weights_of_delay_compensation_are_counted(tmp_path):
    said, parsed, recipe = foretell("ps=1 workers=1 update=bsp", "paramserver.delay_compensation=0.1")
    server = Server(tmp_path, parsed, recipe)
    for number in range(12):
        identity = server.push(number)
        for state in server.states:
            state.apply(make_update(number, (*identity, 1.0)), 0.1)
    # The buffer of the last push waits for the next one.
    assert server.held == sum(said.server.values())


@pytest.mark.parametrize("search", ["strong_wolfe", "fixed"])
def test_the_vectors_of_lbfgs_are_counted(tmp_path, search):
    settings = [f"paramserver.lbfgs_search={search}", "paramserver.lbfgs_history=4"]
    said, parsed, recipe = foretell("ps=1 workers=2 update=lbfgs", *settings)
    # Rugged enough that a search brackets and narrows; each begins anew.
    seen = [most_held(tmp_path, parsed, recipe, search, *rugged(seed)) for seed in range(4)]
    # Before a trial is evaluated its own gradient is not yet among those that the search holds.
    unheld = said.worker["weights"] if search == "strong_wolfe" else 0
    assert max(seen) == sum(said.server.values()) - unheld


def most_held(folder, plan, recipe, search, objective, start):
    """Bytes of a server of lbfgs when it has the most vectors."""
    server = Server(folder, plan, recipe)
    [state] = server.states
    vectors, counts, held = state._vectors, [], []

    async def evaluate():
        # A work unit of each worker waits for the first.
        state._sum.begin(len(counts), 3)
        for unit in (1, 2):
            state.add_part(len(counts), unit, torch.ones_like(state.weights))
        weights = vectors[WEIGHTS].detach().clone().requires_grad_()
        loss = objective(weights[: len(start)])
        (gradient,) = torch.autograd.grad(loss, weights)
        vectors.put(GRADIENT, gradient)
        value = loss.item()
        del gradient, weights, loss
        if not counts or len(vectors.names) > max(counts):
            held.append(server.held)
        counts.append(len(vectors.names))
        return value

    async def walk():
        own = LbfgsSettings(history=4, line_search=search, lr=1.0 if search == "strong_wolfe" else 1e-3)
        here = LocalVectors([vectors], evaluate)
        vectors[WEIGHTS].zero_()
        vectors[WEIGHTS][: len(start)] = start
        memory = await begin(here, own)
        for _ in range(8):
            memory = await iterate(here, memory, own)

    asyncio.run(walk())
    return max(held)


class FakeLine:
    """Gives work units out and takes gradients, with nobody behind it; notes what is held when one is handed in."""

    identity = "worker-0"

    def __init__(self, landing, num_units=5) -> None:
        self.landing = landing
        self.client = SimpleNamespace(is_enough=lambda *_: True)
        self.seen = []
        self._left = iter(range(num_units))

    def take(self, held=()):
        number = next(self._left, None)
        return None if number is None else WorkUnit(number=number, step=number, share=0, need=0, bound=None)

    def ask(self, held=()):
        return done(self.take(held))

    def given(self, asked):
        return asked.result()

    def pull(self, need, bound=None):
        return (0,)

    def pulled(self, under_way):
        return under_way.result()

    def settle(self, handed_in):
        if handed_in is not None:
            handed_in.result()

    def use(self, read):
        pass

    def hand_in(self, gradient, push, read):
        self.seen.append(live_bytes())
        return done(True)

    def pull_after(self, handed_in):
        return done((0,))

    def fetch(self, unit, land):
        land(self.landing.clone(), (0,))
        return done(None)


def done(value):
    future = Future()
    future.set_result(value)
    return future


WORKERS = {
    "bsp": (),
    "bsp overlapped": ("paramserver.overlap=true",),
    "async overlapped": ("paramserver.overlap=true",),
    "async": (),
    "downpour:2,2": (),
    "bsp one local step": ("paramserver.aggregate=fednova", "paramserver.local_steps=1"),
    "bsp local": ("paramserver.aggregate=fednova", "paramserver.local_steps=2"),
    "bsp local overlapped": ("paramserver.aggregate=fednova", "paramserver.local_steps=2", "paramserver.overlap=true"),
    "bsp shares": ("paramserver.batch_shares=[3, 1]",),
}


@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_holds_what_is_said(tmp_path, monkeypatch, name):
    said, plan, recipe = foretell(f"ps=2 workers=2 update={name.split()[0]}", *WORKERS[name])
    place = place_in(tmp_path, "worker", 0, plan, recipe)
    worker = build_worker(place, None)
    before = live_bytes() - worker.flat.weights.nbytes - worker.flat.gradient.nbytes
    config = recipe.paramserver
    has_own = place.rule.kind == "downpour" or bool(config.local_steps) or pulls_ahead(config, place.rule)
    line = FakeLine(worker.flat.weights.clone() if has_own else worker.flat.weights)
    if config.local_steps:
        # Most is held when the steps are done and the direction is made of them.
        is_finite = torch.isfinite
        monkeypatch.setattr(local.torch, "isfinite", lambda one: (line.seen.append(live_bytes()), is_finite(one))[1])
    choose_loop(place)(line, worker, place)
    held, foretold = max(line.seen) - before, sum(said.worker.values())
    assert 0 <= held - foretold < SMALL * worker.flat.weights.nbytes, held / worker.flat.weights.nbytes


def write(folder, *sections):
    path = folder / "recipe.toml"
    path.write_text(
        '[model]\nname = "mlp"\n[data]\nsource = "synthetic"\nkind = "classes"\nsamples = 64\nfeatures = [8]\n'
        "[train]\nsteps = 2\nglobal_batch = 15\n" + "\n".join(sections)
    )
    return path


def test_the_screen_says_whose_bytes_they_are_and_how_large_units_are(tmp_path):
    path = write(tmp_path, "[paramserver]\nbatch_shares = [3, 1]")
    request = TrainRequest(recipe=path, plan="ps=2 workers=2 update=async", run_dir=tmp_path / "run")
    result = dry_run_result(prepare(request, own=OwnPartsHere()))
    text = describe_dry_run(result)
    assert "bytes per server, without" in text and "bytes per worker, without" in text
    assert "work units    of 11, 4 samples" in text and result.micro_batch == 11
    assert result.bytes_per_rank == max(result.bytes_by_role.values(), key=lambda role: role["total"])
