"""The update log counts the rows of each epoch apart, whatever order work units are done in, and keeps the count in a cut."""

import json
import random

import numpy as np
import pytest

from shoal.core.updaterule import UpdateRule
from shoal.data.receipt import hash_range, hash_rows
from shoal.paramserver.log.updates import UpdateLog
from shoal.paramserver.receipts import UnitReceipts
from shoal.paramserver.records import Committed, PushRecord, Refused, WorkUnit

WORKERS, STEPS_PER_EPOCH, EACH = 3, 4, 5
UNITS = WORKERS * STEPS_PER_EPOCH
ROWS = UNITS * EACH


def rows_of(unit):
    place = unit % UNITS * EACH
    ids = np.arange(place, place + EACH, dtype=np.int64)
    return EACH, f"{hash_rows(ids):032x}"


def is_whole(closed):
    return closed.rows == ROWS and int(closed.total, 16) == hash_range(range(ROWS))


def test_epochs_close_in_any_order_of_their_units_and_over_restores():
    draw = random.Random(1)
    units = list(range(3 * UNITS))
    # Nobody is more than an epoch ahead.
    order = sorted(units, key=lambda unit: unit + draw.uniform(0, UNITS))
    receipts, closed = UnitReceipts(units_per_epoch=UNITS), []
    while order:
        count = draw.choice((1, 1, 2, 3))
        push, order = sorted(order[:count]), order[count:]
        closed += receipts.add(push, [rows_of(unit) for unit in push])
        receipts = UnitReceipts.restore(json.loads(json.dumps(receipts.export())))
    assert sorted(one.epoch for one in closed) == [0, 1, 2] and all(is_whole(one) and not one.reason for one in closed)
    assert receipts.export()["open"] == {}, "memory is that of the epochs under way"


def test_what_a_run_without_the_log_cannot_know_is_said():
    receipts = UnitReceipts(units_per_epoch=UNITS, first=UNITS + 2)
    closed = [one for unit in range(UNITS + 2, 3 * UNITS) for one in receipts.add([unit], [rows_of(unit)])]
    assert [one.epoch for one in closed] == [1, 2]
    assert "went on in the middle of epoch 1" in closed[0].reason and not closed[1].reason and is_whole(closed[1])
    longer = UnitReceipts(units_per_epoch=UNITS).going_on(2 * UNITS, settled=UNITS)
    assert longer.add([UNITS], [rows_of(0)]) == [] and longer.export()["open"] == {}
    assert UnitReceipts().add([0], []) == []


def test_only_what_is_in_an_update_counts():
    """Duplicates, refused pushes and units that a dead worker had in hand add nothing."""
    log = UpdateLog(rule=UpdateRule.parse("async"), workers=2, steps=2, duplicate_after=1e-9, units_per_epoch=4)
    log.join("a", 0, 0.0), log.join("b", 1, 0.0)
    number, closed, now = {"a": 0, "b": 0}, [], 0.0

    def commit(worker, unit, rows):
        record = PushRecord(
            worker=worker,
            number=number[worker],
            units=(unit,),
            samples=EACH,
            weight=5.0,
            loss=1.0,
            version=0,
            rows=rows,
        )
        number[worker] += 1
        return log.commit(record, now)

    while True:
        now += 1.0
        taken = {worker: log.take(worker, now) for worker in ("a", "b")}
        given = {worker: one.number for worker, one in taken.items() if isinstance(one, WorkUnit)}
        if not given:
            break
        for worker, unit in given.items():
            assert isinstance(commit(worker, unit, ()), Refused), "a push that does not say its rows"
            for wrong in (((-1, "0" * 32),), ((1, "x" * 32),), ((1, "0" * 31),)):
                assert isinstance(commit(worker, unit, wrong), Refused)
            answer = commit(worker, unit, (rows_of(unit),))
            if isinstance(answer, Committed):
                closed += [one for update in answer.change.closed for one in update.epochs]
    assert log.is_finished and [one.rows for one in closed] == [4 * EACH]
    assert int(closed[0].total, 16) == hash_range(range(4 * EACH))
    assert pytest.approx(1.0) == log.log(0)[0].loss
