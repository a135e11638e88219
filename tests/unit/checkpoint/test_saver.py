"""Saving from one process. Several ranks: tests/multiproc/test_background_save.py; faults: tests/chaos."""

import shutil
import threading

import pytest
import torch

import shoal.checkpoint.places.storage as storage_module
import shoal.checkpoint.saver as saver_module
from shoal.checkpoint.config import CheckpointConfig
from shoal.checkpoint.reader import newest_whole, read
from shoal.checkpoint.saver import Copies, Saver, warn_if_short
from shoal.core.events import CheckpointFailed, CheckpointSaved, Warned

torch.set_num_threads(1)


@pytest.fixture
def events():
    return []


@pytest.fixture
def make_saver(tmp_path, events):
    made = []

    def make(deadline_s=20.0, report=None, settle=None, **config):
        saver = Saver(
            tmp_path / "checkpoints",
            rank=0,
            world_size=1,
            group=None,
            config=CheckpointConfig(**config),
            plan="dp=1",
            deadline_s=deadline_s,
            report=report or events.append,
            settle=settle,
        )
        made.append(saver)
        return saver

    yield make
    for saver in made:
        saver.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "shoal-saver"]


def steps_in(root):
    return sorted(path.name for path in root.iterdir())


@pytest.mark.parametrize("background", [True, False])
def test_a_save_holds_what_was_there_when_it_was_called(make_saver, events, tmp_path, background):
    saver = make_saver(background=background)
    tensors = {"weights/a": torch.arange(6.0).reshape(2, 3).t(), "weights/b": torch.tensor(1, dtype=torch.int64)}
    values = {"position": {"epoch": 1, "offset": [2]}}
    saver.save(5, tensors, values, {"rng/rank-000/torch": torch.arange(4, dtype=torch.uint8)})
    values["position"]["offset"].append(3)
    tensors["weights/a"].zero_()
    outcome = saver.wait()
    assert isinstance(outcome, CheckpointSaved) and events == [outcome] and outcome.step == 5
    assert outcome.path == str(tmp_path / "checkpoints" / "step-00000005")
    checkpoint = read(newest_whole(tmp_path / "checkpoints").path)
    assert checkpoint.tensors["weights/a"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert checkpoint.tensors["rng/rank-000/torch"].tolist() == [0, 1, 2, 3]
    assert checkpoint.values == {"position": {"epoch": 1, "offset": [2]}} and checkpoint.manifest.plan == "dp=1"
    assert outcome.num_bytes == checkpoint.manifest.num_bytes


def test_a_checkpoint_counts_after_what_was_told_is_on_disk(make_saver, tmp_path):
    root = tmp_path / "checkpoints"
    seen = []
    saver = make_saver(settle=lambda: seen.append(steps_in(root) if root.exists() else []))
    for step in (5, 10):
        saver.save(step, {"weights/a": torch.zeros(2)}, {})
    saver.wait()
    assert seen == [[], ["step-00000005"]] and steps_in(root) == ["step-00000005", "step-00000010"]


def test_parameters_that_need_gradients_are_saved_without_them(make_saver):
    model = torch.nn.Linear(3, 2)
    saver = make_saver()
    saver.save(1, dict(model.named_parameters()), {})
    assert isinstance(saver.wait(), CheckpointSaved)


def test_saves_follow_each_other_and_the_oldest_expire(make_saver, events, tmp_path):
    saver = make_saver(keep=2, keep_every=20)
    for step in range(10, 70, 10):
        saver.take(step)
        saver.save(step, {"weights/a": torch.full((4,), float(step))}, {})
    saver.close()
    assert [event.step for event in events] == [10, 20, 30, 40, 50, 60]
    assert steps_in(tmp_path / "checkpoints") == [f"step-000000{step}" for step in (20, 40, 50, 60)]
    assert read(newest_whole(tmp_path / "checkpoints").path).tensors["weights/a"].tolist() == [60.0] * 4


def test_where_none_is_known_to_be_good_the_oldest_stays(make_saver, tmp_path):
    saver = make_saver(keep=1)
    for step in (10, 20, 30):
        saver.save(step, {"weights/a": torch.zeros(4)}, {})
    saver.close()
    assert steps_in(tmp_path / "checkpoints") == ["step-00000010", "step-00000030"]


def test_waiting_and_closing_without_a_save_is_nothing(make_saver):
    saver = make_saver()
    assert saver.wait() is None
    saver.close()
    saver.close()


@pytest.mark.parametrize(
    ("tensors", "values", "reason"),
    [
        ({"a": torch.ones(2)}, {"x": object()}, "object is not a value that JSON can hold"),
        ({"a": torch.ones(2, dtype=torch.complex128)}, {}, "complex128"),
    ],
)
def test_what_cannot_be_saved_fails_the_save_and_not_the_run(make_saver, events, tensors, values, reason):
    saver = make_saver()
    saver.save(1, tensors, values)
    outcome = saver.wait()
    assert isinstance(outcome, CheckpointFailed) and reason in outcome.reason and "rank 0" in outcome.reason
    saver.save(2, {"a": torch.ones(2)}, {})
    assert isinstance(saver.wait(), CheckpointSaved) and len(events) == 2


def test_a_folder_that_cannot_be_made_is_a_failed_save(make_saver, tmp_path):
    (tmp_path / "checkpoints").write_text("a file is in the way")
    saver = make_saver()
    saver.save(1, {"a": torch.ones(2)}, {})
    outcome = saver.wait()
    assert isinstance(outcome, CheckpointFailed) and "rank 0: cannot make a folder" in outcome.reason
    (tmp_path / "checkpoints").unlink()
    saver.save(2, {"a": torch.ones(2)}, {})
    assert isinstance(saver.wait(), CheckpointSaved)


def test_a_deletion_that_fails_is_a_warning(make_saver, events, tmp_path, monkeypatch):
    def refuse(root, **_):
        raise PermissionError(1, "Operation not permitted", str(root))

    monkeypatch.setattr(storage_module, "expire", refuse)
    saver = make_saver(keep=1)
    saver.save(1, {"a": torch.ones(2)}, {})
    assert isinstance(saver.wait(), CheckpointSaved)
    warning, _ = events
    assert isinstance(warning, Warned) and "cannot delete expired checkpoints" in warning.message


def test_a_writer_that_never_ends_holds_up_nobody(make_saver, events, monkeypatch):
    """The thread is held in its report; the deadline of the save, not the thread, decides when waiting ends."""
    monkeypatch.setattr(saver_module, "_GRACE_SECONDS", 0.1)
    release = threading.Event()

    def report(event):
        if isinstance(event, CheckpointSaved):
            assert release.wait(30)
        events.append(event)

    saver = make_saver(deadline_s=0.5, report=report)
    saver.save(1, {"a": torch.ones(2)}, {})
    outcome = saver.wait()
    assert isinstance(outcome, CheckpointFailed) and "step 1 is still being written after 0.5 s" in outcome.reason
    saver.save(2, {"a": torch.ones(2)}, {})
    assert "restart the run" in saver.wait().reason
    # It ends after all: that is told too, and saving works again.
    release.set()
    saver.close()
    saver.save(3, {"a": torch.ones(2)}, {})
    assert isinstance(saver.wait(), CheckpointSaved)
    assert [(type(event), event.step) for event in events] == [
        (CheckpointFailed, 1),
        (CheckpointFailed, 2),
        (CheckpointSaved, 1),
        (CheckpointSaved, 3),
    ]


def test_an_unforeseen_error_in_the_thread_is_a_failed_save_and_not_silence(make_saver, events, monkeypatch):
    seen = []
    monkeypatch.setattr(threading, "excepthook", seen.append)

    def broken(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr(saver_module, "attempt", broken)
    saver = make_saver()
    saver.save(1, {"a": torch.ones(2)}, {})
    assert "the writing thread died" in saver.wait().reason
    saver.save(2, {"a": torch.ones(2)}, {})
    assert isinstance(saver.wait(), CheckpointFailed) and [event.step for event in events] == [1, 2]
    saver.close()
    assert [error.exc_type for error in seen] == [ZeroDivisionError]


def test_copies_use_their_memory_again():
    copies = Copies()
    state = {"a": torch.ones(3), "b": torch.ones(2, 2)}
    first = copies.take(state)
    places = {name: tensor.data_ptr() for name, tensor in first.items()}
    state["a"].fill_(7)
    assert first["a"].tolist() == [1.0] * 3
    second = copies.take(state)
    assert {name: tensor.data_ptr() for name, tensor in second.items()} == places and second["a"].tolist() == [7.0] * 3
    third = copies.take({"a": torch.ones(4), "c": torch.ones(1)})
    assert third["a"].shape == (4,) and set(third) == {"a", "c"}


def test_enough_room_is_no_warning(tmp_path):
    assert warn_if_short(tmp_path / "run" / "checkpoints", 1) is None


def test_too_little_room_names_both_numbers_and_the_fix(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    warning = warn_if_short(tmp_path / "run" / "checkpoints", 10 * free)
    assert "need" in warning and "the disk has" in warning and "checkpoint.keep" in warning
    assert not (tmp_path / "run").exists()
