"""Loggers: each in its own thread, none that can stop a run; MLflow with a store on disk, Weights & Biases without network."""

import sys
import threading

import pytest

from shoal import Run
from shoal.core.errors import RequestError
from shoal.core.events import Evaluated, RunEnded, StepDone
from shoal.telemetry import loggers
from shoal.telemetry.config import LogConfig
from shoal.telemetry.loggers import LoggerThread, check_loggers, close_all, open_named


def step(number):
    return StepDone(
        step=number, loss=1.0 / number, lr=0.1, grad_norm=2.0, samples=4, tokens=8, seconds=0.5, data_seconds=0.1
    )


class Kept:
    """Keeps what it is given."""

    def __init__(self):
        self.points, self.is_closed = [], False

    def log(self, values, step):
        self.points.append((step, values["train/loss"]))

    def close(self):
        self.is_closed = True


class Refusing:
    """Raises, each time."""

    def log(self, values, step):
        raise OSError("no route to host")


class Hanging:
    """Does not come back until it is let go."""

    def __init__(self):
        self.go = threading.Event()

    def log(self, values, step):
        self.go.wait(60)


def test_every_step_arrives_whatever_other_loggers_do():
    kept, hanging, warned = Kept(), Hanging(), []
    threads = [
        LoggerThread(lambda one=one: one, name=type(one).__name__, warn=warned.append)
        for one in (kept, Refusing(), hanging)
    ]
    for number in range(1, 31):
        for thread in threads:
            thread.write(step(number))
    close_all(threads, within=1.0)
    hanging.go.set()
    assert kept.points == [(number, 1.0 / number) for number in range(1, 31)] and kept.is_closed
    assert sorted(line.split(":")[0] for line in warned) == [
        "logger 'Hanging' does not answer and is left behind, with 29 events that it did not take",
        "logger 'Refusing' failed and is off",
    ], "each is said once"


def test_a_logger_whose_package_is_missing_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setattr(loggers.importlib.util, "find_spec", lambda name: None)
    for name in ("mlflow", "wandb", "tensorboard"):
        with pytest.raises(RequestError, match=rf"pip install 'shoal\[{name}\]'"):
            check_loggers(LogConfig(to=(name,)))
    with pytest.raises(RequestError, match="2 times; name it once"):
        check_loggers(LogConfig(to=("mlflow", "mlflow")))


def log_some(folder, config, steps, *ends, has_failed=False):
    warned = []
    named = open_named(config, folder=str(folder), name="a run", facts={"plan": "dp=2", "train.seed": 1})
    threads = [LoggerThread(opener, name=name, warn=warned.append) for name, opener in named.items()]
    found = Evaluated(step=2, split="validation", loss=0.25, accuracy=None, samples=1, seconds=0.1, metrics={"f1": 0.5})
    for thread in threads:
        for event in [*map(step, steps), found, *ends]:
            thread.write(event)
    close_all(threads, within=60, has_failed=has_failed)
    assert warned == []


def test_mlflow_has_every_point_and_a_resumed_run_goes_on_in_the_same_one(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    tracking = pytest.importorskip("mlflow.tracking")
    config = LogConfig(to=("mlflow",))
    client = tracking.MlflowClient(tracking_uri=(tmp_path / "mlflow").as_uri())
    interrupted = RunEnded(status="interrupted", step=2, seconds=1.0)
    for steps, ends, has_failed, status in (
        ([1], [], True, "FAILED"),
        ([2], [interrupted], False, "KILLED"),
        ([3], [], False, "FINISHED"),
    ):
        log_some(tmp_path, config, steps, *ends, has_failed=has_failed)
        (run,) = client.search_runs([client.get_experiment_by_name("shoal").experiment_id])
        assert run.info.status == status
    assert run.info.run_name == "a run" and run.data.params["plan"] == "dp=2"
    points = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(point.step, point.value) for point in points] == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert run.data.metrics["validation/f1"] == 0.5


def test_wandb_writes_its_files_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setattr(sys, "exit", sys.exit)  # W&B puts a function of its own there, which other tests must not meet.
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    log_some(tmp_path, LogConfig(to=("wandb",)), [1, 2, 3])
    (written,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = written.read_bytes()
    assert content.count(b"train/loss") >= 3 and b"validation/f1" in content


@pytest.mark.parametrize("name", ["mlflow", "wandb", "tensorboard"])
def test_a_logger_that_keeps_files_needs_a_run_directory(name, tmp_path, monkeypatch):
    pytest.importorskip({"tensorboard": "tensorboardX"}.get(name, name))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(RequestError, match=f"logger '{name}'.* this run has none; give run_dir="), Run(loggers=[name]):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("given", [print, {}, Kept])
def test_what_cannot_log_is_refused(given):
    with pytest.raises(RequestError, match=r"has no log\(values, step\) that can be called"), Run(loggers=[given]):
        pass
