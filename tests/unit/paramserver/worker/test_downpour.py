"""Downpour: pushing and fetching each step it is plain training, else the loop of the paper; no fetch lands inside a step."""

import threading
import time

import pytest
import torch

from shoal.core.errors import RequestError, RunError
from shoal.paramserver.worker.own_steps import DownpourSettings, DownpourWorker

SIZE = 33


def gradient_at(weights, step):
    """A gradient that depends on the weights and on the step's data, not convex."""
    data = torch.randn(SIZE, generator=torch.Generator().manual_seed(step))
    return torch.sin(weights * 3) + 0.3 * weights * data + data


def start():
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(99))


class Server:
    """Weights with any torch optimizer."""

    def __init__(self, kind, lr):
        self.weights = torch.nn.Parameter(start())
        self.optimizer = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}[kind]([self.weights], lr=lr)
        self.version = 0
        self.sizes = []

    def apply(self, push):
        self.weights.grad = push.gradient
        self.optimizer.step()
        self.version += 1
        self.sizes.append(push.num_gradients)

    def pull(self):
        return self.weights.detach().clone(), (self.version,)


def train(server, settings, num_steps):
    weights = torch.zeros(SIZE)
    worker = DownpourWorker(weights, settings)
    for step in range(num_steps):
        if worker.wants_fetch:
            worker.land(*server.pull())
        worker.begin_step()
        push = worker.end_step(gradient_at(weights, step))
        if push is not None:
            server.apply(push)
    return worker, weights


@pytest.mark.parametrize("kind", ["sgd", "adagrad"])
def test_one_worker_that_pushes_and_fetches_each_step_is_plain_training(kind):
    server = Server(kind, lr=0.05)
    worker, _ = train(server, DownpourSettings(push_every=1, fetch_every=1, lr=0.7), 25)
    plain = Server(kind, lr=0.05)
    for step in range(25):
        plain.weights.grad = gradient_at(plain.weights.detach(), step)
        plain.optimizer.step()
    assert torch.equal(server.weights, plain.weights)
    assert worker.read == (24,) and server.version == 25


def paper(push_every, fetch_every, lr, server_lr, num_steps):
    """Algorithms 7.1 and 7.2 as they stand, one replica, with Adagrad written out on the server."""
    server_weights, squares = start(), torch.zeros(SIZE)
    accrued, weights = torch.zeros(SIZE), torch.zeros(SIZE)
    for step in range(num_steps):
        if step % fetch_every == 0:
            weights = server_weights.clone()
        gradient = gradient_at(weights, step)
        accrued = accrued + gradient
        weights = weights - lr * gradient
        if step % push_every == 0:
            squares = squares + accrued * accrued
            server_weights = server_weights - server_lr * accrued / (squares.sqrt() + 1e-10)
            accrued = torch.zeros(SIZE)
    return server_weights, weights, accrued


@pytest.mark.parametrize(("push_every", "fetch_every"), [(5, 5), (3, 5), (5, 2), (1, 4), (7, 1)])
def test_it_is_the_loop_of_the_paper(push_every, fetch_every):
    server = Server("adagrad", lr=0.05)
    settings = DownpourSettings(push_every=push_every, fetch_every=fetch_every, lr=0.02)
    worker, weights = train(server, settings, 23)
    theirs, local, accrued = paper(push_every, fetch_every, 0.02, 0.05, 23)
    assert torch.allclose(server.weights.detach(), theirs, rtol=1e-5, atol=1e-6)
    assert torch.allclose(weights, local, rtol=1e-5, atol=1e-6)
    assert server.sizes[0] == 1 and set(server.sizes[1:]) == {push_every}
    rest = worker.flush()
    assert (rest is None and not accrued.any()) or torch.allclose(rest.gradient, accrued, rtol=1e-5, atol=1e-6)
    assert sum(server.sizes) + (rest.num_gradients if rest else 0) == 23, "no gradient is lost"
    assert worker.flush() is None


def test_a_fetch_that_lands_inside_a_step_waits_for_its_end():
    weights = torch.zeros(SIZE)
    worker = DownpourWorker(weights, DownpourSettings(lr=0.5))
    worker.begin_step()
    before = weights.clone()
    thread = threading.Thread(target=worker.land, args=(torch.full((SIZE,), 9.0), (4, 6)))
    thread.start()
    thread.join(timeout=10)
    assert torch.equal(weights, before), "a step's weights are those that it began with"
    worker.end_step(torch.ones(SIZE))
    assert weights.tolist() == [-0.5] * SIZE, "the worker's own step is taken from them"
    assert worker.read == (0,)
    worker.begin_step()
    assert weights.tolist() == [9.0] * SIZE and worker.read == (4, 6) and worker.num_applied == 1


def test_many_fetches_from_another_thread_never_show_inside_a_step():
    weights = torch.zeros(4096)
    worker = DownpourWorker(weights, DownpourSettings(lr=0.0))
    stop = threading.Event()

    def fetch():
        version = 0
        while not stop.is_set():
            version += 1
            worker.land(torch.full((4096,), float(version)), (version,))

    thread = threading.Thread(target=fetch)
    thread.start()
    try:
        steps, ends = 0, time.monotonic() + 30
        # As many as it takes that the other thread has landed twice: on a busy machine it has few turns.
        while steps < 300 or (worker.num_applied <= 1 and time.monotonic() < ends):
            steps += 1
            worker.begin_step()
            seen = weights.clone()
            assert seen.min() == seen.max() == worker.read[0], "one version, and the one it says"
            assert torch.equal(seen, weights)
            worker.end_step(seen)
    finally:
        stop.set()
        thread.join(timeout=10)
    assert worker.num_applied > 1


def test_an_older_answer_does_not_replace_a_newer_one():
    worker = DownpourWorker(torch.zeros(SIZE), DownpourSettings(lr=0.1))
    assert worker.land(torch.ones(SIZE), (5, 7))
    assert not worker.land(torch.zeros(SIZE), (4, 9)), "a rule counts from the shard that is furthest behind"
    assert not worker.land(torch.zeros(SIZE), (5, 6)), "and of two that are even in it the other shards tell"
    worker.begin_step()
    assert worker.read == (5, 7)
    worker.end_step(torch.ones(SIZE))
    assert not worker.land(torch.zeros(SIZE), (4, 7)), "not even after it was used"
    assert worker.land(torch.ones(SIZE), (5, 8))


def test_a_push_says_how_late_it_is_and_keeps_its_tensor():
    worker = DownpourWorker(torch.zeros(SIZE), DownpourSettings(push_every=2, fetch_every=1, lr=0.1))
    pushes = []
    for step in range(5):
        worker.land(torch.zeros(SIZE), (10 * step + 3, 10 * step))
        worker.begin_step()
        push = worker.end_step(torch.full((SIZE,), float(step)))
        pushes += [push] if push is not None else []
    assert [(push.first_step, push.num_gradients, push.read, push.version) for push in pushes] == [
        (0, 1, (3, 0), 0),
        (1, 2, (13, 10), 10),
        (3, 2, (33, 30), 30),
    ]
    assert [float(push.gradient[0]) for push in pushes] == [0.0, 3.0, 7.0]


@pytest.mark.parametrize("wrong", [{"push_every": 0}, {"fetch_every": 0}, {"lr": -1.0}])
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(RequestError, match="downpour:"):
        DownpourSettings(**{"lr": 0.1, **wrong})


def test_what_does_not_fit_is_refused():
    worker = DownpourWorker(torch.zeros(SIZE), DownpourSettings(lr=0.1))
    with pytest.raises(RunError, match="does every process build the same model"):
        worker.land(torch.zeros(SIZE + 1), (0,))
    worker.begin_step()
    with pytest.raises(RunError, match="step 0 gave a gradient"):
        worker.end_step(torch.zeros(SIZE, dtype=torch.float64))


def test_a_push_tells_what_was_read_although_a_newer_fetch_with_the_same_oldest_shard_is_here():
    worker = DownpourWorker(torch.zeros(SIZE), DownpourSettings(push_every=1, fetch_every=1, lr=0.1))
    worker.land(torch.zeros(SIZE), (7, 4))
    worker.begin_step()
    worker.land(torch.ones(SIZE), (9, 4))
    push = worker.end_step(torch.ones(SIZE))
    assert push is not None and push.read == (7, 4)
    worker.begin_step()
    push = worker.end_step(torch.ones(SIZE))
    assert push is not None and push.read == (9, 4)
