"""Data that grows under parameter servers: every epoch has every sample of one version once, whoever dies and goes on."""

import json
import random
from collections import Counter

import numpy as np
import pytest
import torch

from shoal.core.updaterule import UpdateRule
from shoal.data.order import Position
from shoal.data.receipt import Counted, hash_range
from shoal.data.source import Items
from shoal.paramserver.epochs import EpochSpan, EpochTable
from shoal.paramserver.log.commands import Command, CommandLog, restart_update_log, update_log_after
from shoal.paramserver.log.updates import UpdateLog
from shoal.paramserver.records import Committed, PushRecord, WorkUnit
from shoal.serverrun.worker.shares import ShareRunner

BATCH, SHARES, SAMPLES = 4, 2, {1: 10, 2: 10, 3: 21, 4: 23}
FIRST = EpochSpan(epoch=0, first_step=0, version=1, samples=10)


def table_of(first=FIRST):
    return EpochTable(batch=BATCH, shares=SHARES, first=first)


def test_an_epoch_that_was_begun_keeps_its_version():
    table = table_of()
    table.tell(3, 21)
    assert table.open(0).version == 3, "what is there before the first work unit is read from the first epoch on"
    table = table_of()
    assert table.open(0) == FIRST
    table.tell(3, 21)
    table.tell(2, 10)
    assert [table.open(step).version for step in (1, 2, 0)] == [1, 1, 1]
    grown = table.open(3)
    assert grown == EpochSpan(epoch=1, first_step=3, version=3, samples=21)
    assert table.at(2) == FIRST and table.at(8) == grown and table.at(9).epoch == 2 and table.at(9).first_step == 9
    assert table.position(5) == Position(epoch=1, offset=8, version=3)
    again = EpochTable.restore(json.loads(json.dumps(table.export())))
    assert again.export() == table.export() and again.newest_version == 3
    # Without the log a run goes on at step 3: the epoch that begins there is not decided yet.
    again.begin_at(3)
    again.tell(4, 23)
    assert again.open(3) == EpochSpan(epoch=1, first_step=3, version=4, samples=23)


class Growing:
    """Samples that are their own number."""

    follows, uniform_weight = True, 1

    def __init__(self):
        self.version = 1

    def __len__(self):
        return SAMPLES[self.version]

    def newest_version(self):
        return max(SAMPLES)

    def grow(self, version):
        self.version = version

    def collate(self, ids):
        tensor = torch.as_tensor(np.asarray(ids, dtype=np.int64))
        return Items(inputs=(tensor,), targets=tensor, weight=len(tensor))


class Recording:
    """In the place of a parallel model: keeps the samples that it is given."""

    def __init__(self):
        self.given, self.runtime = [], None

    def forward_backward(self, batch, *, step):
        self.given = [int(one) for microbatch in batch.microbatches for one in microbatch.sample_ids]
        return 0.5


class Job:
    """Two workers and a log that is killed, restarted and told of versions as the draw has it."""

    def __init__(self, rule, steps, seed):
        self.draw, self.rule, self.steps = random.Random(seed), rule, steps
        log = UpdateLog(rule=UpdateRule.parse(rule), workers=SHARES, steps=steps, units_per_epoch=3 * SHARES)
        log.receipts.epochs = table_of()
        self.log = CommandLog(log, cut_every=SHARES)
        self.kept = {self.log.update_log.closed: ({}, [])}
        self.seen, self.closed, self.names, self.numbers = {}, [], {}, Counter()
        self.workers = 0
        self.start()

    def start(self):
        """New workers, as after a death of all: each with the data of the start."""
        self.names = {}
        for index in range(SHARES):
            self.join(index)

    def join(self, index):
        self.workers += 1
        name, model = f"w{self.workers}", Recording()
        shares = ShareRunner(
            model, Growing(), seed=5, global_batch=BATCH, num_shares=SHARES, num_microbatches=1, of_the_step=True
        )
        self.names[name] = (index, model, shares, {})
        self.log.enter(Command(kind="join", worker=name, number=index, now=0.0))

    def kill(self, name):
        index = self.names.pop(name)[0]
        self.log.enter(Command(kind="leave", worker=name, now=0.0))
        self.join(index)

    def go_back(self, cut):
        """Everyone goes on from a checkpoint: what came after it was not trained on."""
        log = restart_update_log(cut, rule=str(self.log.update_log.rule), workers=SHARES, steps=self.steps)
        self.log = CommandLog(log, cut_every=SHARES)
        self.seen, self.closed = json.loads(json.dumps(self.kept[log.closed]))
        self.start()

    def turn(self):
        name = self.draw.choice(list(self.names))
        _, model, shares, held = self.names[name]
        if held and self.draw.random() < 0.6:
            return self.push(name, *held.popitem())
        found = self.log.enter(Command(kind="take", worker=name, held=tuple(held), now=0.0))
        if isinstance(found, WorkUnit):
            result = shares.run(found.step, found.share, data=found.data)
            held[found.number] = (found.data.epoch, model.given, result)
        return None

    def push(self, name, unit, done):
        epoch, given, result = done
        self.numbers[name] += 1
        record = PushRecord(
            worker=name, number=self.numbers[name], units=(unit,), samples=result.samples, weight=1.0, loss=0.5,
            version=self.log.update_log.closed, rows=(result.rows,), waited=0.0,
        )  # fmt: skip
        answer = self.log.enter(Command(kind="commit", worker=name, push=record, now=0.0))
        assert isinstance(answer, Committed), answer
        self.seen.setdefault(str(epoch), []).extend(given)
        for update in answer.change.closed:
            self.closed += [[one.epoch, one.rows, one.total, one.samples] for one in update.epochs]
        self.kept[self.log.update_log.closed] = json.loads(json.dumps([self.seen, self.closed]))


@pytest.mark.parametrize("seed", range(6))
def test_every_epoch_is_every_sample_of_its_version_once_over_kills_and_resumes(seed):
    job = Job("async", 40, seed)
    versions = [4, 3, 2]
    while not job.log.update_log.is_finished:
        job.turn()
        drawn = job.draw.random()
        if drawn < 0.02 and versions and job.log.update_log.num_done > 12:
            version = versions.pop()
            job.log.enter(Command(kind="grow", number=version, samples=SAMPLES[version], now=0.0))
        elif drawn < 0.04:
            job.kill(job.draw.choice(list(job.names)))
        elif drawn < 0.05 and job.log.cuts:
            # A backup takes over, and a job goes back to its checkpoint.
            copy = CommandLog.restore(job.log.export())
            assert copy.update_log.digest() == job.log.update_log.digest()
            job.go_back(job.log.cuts[max(job.log.cuts)])
            if len(versions) < 3:
                newest = 4 - len(versions)
                job.log.enter(Command(kind="grow", number=newest, samples=SAMPLES[newest], now=0.0))
    spans = job.log.update_log.receipts.epochs.spans
    assert len(spans) > 1, "no version was taken up"
    for epoch, rows, total, samples in job.closed:
        assert Counter(job.seen[str(epoch)]) == Counter(range(samples)), f"epoch {epoch}"
        assert Counted(rows=rows, total=int(total, 16)) == Counted(rows=samples, total=hash_range(range(samples)))
    assert {samples for *_, samples in job.closed} >= {10, spans[-1].samples} and len(job.closed) >= 6


def test_a_run_of_other_shares_goes_on_with_the_epochs_of_the_checkpoint():
    log = UpdateLog(rule=UpdateRule.parse("async"), workers=3, steps=9, units_per_epoch=9)
    log.receipts.epochs = table_of(EpochSpan(epoch=4, first_step=2, version=3, samples=21))
    after = update_log_after(5, log, updates_per_step=3)
    assert after.receipts.epochs.position(5) == Position(epoch=4, offset=12, version=3)
