"""A script's own loop: its epochs are proved, over a resume too; what the script leaves out is told, what is lost is refused."""

import json

import pytest
import torch
from torch import nn

import shoal
from shoal.data.loading.parts import Share

DATA = [(torch.full((8,), float(index % 5)), index % 3) for index in range(30)]


def train(folder, steps, *, resume=False, skip=None, save_at=None):
    """So many steps of 8 samples, four of them an epoch; the events of receipts."""
    with shoal.Run(run_dir=folder, resume=resume) as run:
        model = nn.Linear(8, 3)
        loader = run.loader(DATA, global_batch=8)
        run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=nn.CrossEntropyLoss())
        for number, batch in enumerate(loader.steps(steps)):
            if number == save_at:
                run.save(wait=True)
            if number != skip:
                run.step(batch)
    lines = (folder / "events" / "rank-000.jsonl").read_text().splitlines()
    return [one for one in map(json.loads, lines) if one["kind"] == "epoch_receipt"]


def test_epochs_of_a_script_are_proved_over_a_resume(tmp_path):
    assert [(one["rows"], one["ok"]) for one in train(tmp_path, 6)] == [(30, True)]
    assert [(one["epoch"], one["rows"], one["ok"]) for one in train(tmp_path, 6, resume=True)] == [
        (0, 30, True),
        (1, 30, True),
        (2, 30, True),
    ]


def test_a_batch_that_the_script_leaves_out_has_no_receipt_and_the_next_epoch_has(tmp_path):
    found = train(tmp_path, 8, skip=1)
    assert [(one["ok"], "left a batch out" in one["reason"]) for one in found] == [(None, True), (True, False)]


def test_a_save_between_reading_and_training_proves_nothing_of_what_goes_on_from_it(tmp_path):
    assert [one["ok"] for one in train(tmp_path, 2, save_at=1)] == []


def test_a_loader_that_loses_a_sample_ends_the_script(tmp_path, monkeypatch):
    honest, calls = Share.cut, iter(range(100))
    monkeypatch.setattr(Share, "cut", lambda self, ids: honest(self, ids[1:] if next(calls) == 2 else ids))
    with pytest.raises(shoal.RunError, match="epoch 0 trained on 29 samples and the data has 30: 1 are missing"):
        train(tmp_path, 8)
