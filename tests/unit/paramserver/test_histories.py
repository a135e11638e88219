"""Random histories of faults over the update log and the shards' replicas: bit for bit what one process computes, and nothing
lost."""

import pytest
import torch

from shoal.core.errors import RunError
from shoal.paramserver import consistency
from shoal.paramserver.consistency import Lateness
from shoal.paramserver.log.queue import Member, WorkQueue
from shoal.paramserver.log.updates import UpdateLog
from shoal.paramserver.server.gradients import Gradients
from shoal.paramserver.server.shard import ShardState
from support.paramserver.fault_history import History, check_accounting, check_staleness, rate
from support.paramserver.torch_oracle import replay, train_alone, train_stepwise

RULES = ["bsp", "ssp:0", "ssp:1", "ssp:3", "async", "half", "half:2,0", "half:3,2", "downpour:2,3", "downpour:3,1"]
OPTIMIZERS = ["momentum", "adamw", "adagrad"]


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), f"{name} differs by {(found[name] - tensor).abs().max():.3g}"


def check(history: History) -> None:
    """Everything that must be true of a run that is over."""
    check_accounting(history)
    check_staleness(history)
    log = [[tuple(entry) for entry in record.entries] for record in history.log]
    plain = replay(log, history.reads, history.optim.name, rate)
    for replica in range(2):
        assert_same(history.whole(replica), plain.weights)
    if history.rule.staleness == 0:
        again = train_stepwise(history.steps, history.workers, history.optim.name, rate)
        assert_same(history.whole(0), again.weights)


@pytest.mark.parametrize("update", RULES)
def test_every_history_has_the_bits_of_one_process(update):
    for seed in range(6):
        check(History(update, seed, optimizer=OPTIMIZERS[seed % 3]).run())


@pytest.mark.soak
@pytest.mark.parametrize("update", RULES)
def test_many_histories_have_the_bits_of_one_process(update):
    for seed in range(6, 150):
        optimizer, crashes = OPTIMIZERS[seed % 3], seed % 2 == 0
        history = History(update, seed, optimizer=optimizer, workers=3 + seed % 3, steps=3 + seed % 7, crashes=crashes)
        check(history.run())


@pytest.mark.parametrize("update", ["bsp", "ssp:2", "async", "half", "downpour:2,2"])
def test_a_run_that_begins_again_from_its_checkpoint_has_the_bits_of_one_process(update):
    histories = [History(update, seed, steps=8, optimizer="adamw", crashes=True).run() for seed in range(4)]
    assert sum(history.num_crashes for history in histories) > 0
    for history in histories:
        check(history)


@pytest.mark.parametrize("update", ["async", "half:2,1", "downpour:2,2"])
def test_old_gradients_are_discounted_and_dropped_by_the_same_log(update):
    dropped = 0
    for seed in range(6):
        history = History(update, seed, lateness=Lateness(staleness_aware=True, drop_beyond=1)).run()
        check(history)
        dropped += history.update_log.num_dropped
        ages = [record.staleness for record in history.log]
        assert max(ages) <= 1
    assert dropped > 0


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_async_with_one_worker_is_plain_training(optimizer):
    history = History("async", 0, workers=1, steps=12, optimizer=optimizer, faults=False).run()
    assert_same(history.whole(0), train_alone(12, optimizer, rate).weights)
    with_faults = History("async", 1, workers=1, steps=12, optimizer=optimizer).run()
    check(with_faults)


def test_faults_happen_in_these_histories():
    """A history in which nothing went wrong would prove nothing."""
    histories = [History("ssp:2", seed, steps=8).run() for seed in range(9)]
    assert sum(history.num_born for history in histories) > 9 * 3
    assert sum(history.update_log.num_duplicates for history in histories) > 0
    assert sum(history.num_refused for history in histories) > 0
    assert max(record.staleness for history in histories for record in history.log) == 2


def _in_arrival_order(monkeypatch):
    original = consistency.next_update
    monkeypatch.setattr(
        consistency,
        "next_update",
        lambda rule, pending, **more: tuple(one for one in pending if one in original(rule, pending, **more)),
    )


def _one_step_too_many(monkeypatch):
    original = consistency.needs
    monkeypatch.setattr(consistency, "needs", lambda rule, step: max(0, original(rule, step) - 1))


def _deaths_lose_units(monkeypatch):
    def release(self, worker, units):
        for unit in units:
            del self._doing[unit]
        return ()

    monkeypatch.setattr(WorkQueue, "release", release)


def _discard_takes_committed_ones_too(monkeypatch):
    original = Gradients.discard
    monkeypatch.setattr(Gradients, "discard", lambda self, worker, keep: original(self, worker, ()))


def _used_gradients_are_forgotten(monkeypatch):
    def retire(self, identities):
        for identity in identities:
            self._stored.pop(identity, None)

    monkeypatch.setattr(Gradients, "retire", retire)


def _commits_are_not_remembered(monkeypatch):
    monkeypatch.setattr(Member, "remember", lambda self, number, outcome: self)


def _a_new_backup_begins_with_zero_moments(monkeypatch):
    monkeypatch.setattr(ShardState, "load_optimizer_state", lambda self, tensors: None)


def _a_new_backup_lacks_waiting_gradients(monkeypatch):
    original = Gradients.restore
    monkeypatch.setattr(Gradients, "restore", lambda self, stored, retired, gone: original(self, {}, retired, gone))


def _factors_are_left_out(monkeypatch):
    monkeypatch.setattr(ShardState, "_scaled", lambda self, stored, factor: stored.gradient)


def _lost_takes_stay_lost(monkeypatch):
    original = UpdateLog.take
    monkeypatch.setattr(UpdateLog, "take", lambda self, worker, now, held=None: original(self, worker, now))


def _the_update_log_forgets_what_waits(monkeypatch):
    original = UpdateLog.export
    monkeypatch.setattr(UpdateLog, "export", lambda self: original(self) | {"pending": []})


def _a_restart_keeps_what_waited(monkeypatch):
    def restart(self, now):
        for worker in list(self._members):
            self.leave(worker, now)

    monkeypatch.setattr(UpdateLog, "restart", restart)


BUGS = [
    (_a_restart_keeps_what_waited, "ssp:3"),
    (_in_arrival_order, "ssp:1"),
    (_one_step_too_many, "ssp:1"),
    (_deaths_lose_units, "bsp"),
    (_discard_takes_committed_ones_too, "ssp:3"),
    (_used_gradients_are_forgotten, "async"),
    (_commits_are_not_remembered, "async"),
    (_a_new_backup_begins_with_zero_moments, "bsp"),
    (_a_new_backup_lacks_waiting_gradients, "ssp:3"),
    (_factors_are_left_out, "half:2,0"),
    (_lost_takes_stay_lost, "bsp"),
    (_the_update_log_forgets_what_waits, "ssp:3"),
]


@pytest.mark.parametrize(("plant", "update"), BUGS, ids=[plant.__name__.strip("_") for plant, _ in BUGS])
def test_planted_bugs_are_caught(plant, update, monkeypatch):
    plant(monkeypatch)
    # By an oracle, or by a refusal of the update log or of a shard.
    with pytest.raises((AssertionError, RunError)):
        for seed in range(30):
            check(History(update, seed, deaths=seed % 2 == 0, crashes=seed % 4 == 2).run(most=4000))
