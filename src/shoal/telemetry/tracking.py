"""MLflow and Weights & Biases as loggers: small adapters behind extras, imported when a run opens them.

Both keep what they log of one run directory in one run of theirs: a resumed run goes on in it.
"""

import hashlib
import importlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.core.rundir import replace_text
from shoal.telemetry.config import LogConfig

_ID_FILE = "mlflow_run_id"
_MOST_AT_ONCE = 1000
"""Metrics that MLflow takes in one call."""
_MLFLOW_ENDS = {"completed": "FINISHED", "interrupted": "KILLED"}
"""What MLflow calls a run that ended so; any other has FAILED."""


class MLflowLogger:
    """Logs to a tracking server, or to a store of MLflow's own on disk.

    Args:
        config: of the recipe.
        folder: the run directory; None for a run that keeps nothing, and therefore has a URI.
        name: of the run.
        facts: settings, which become parameters of the run.
    """

    def __init__(self, config: LogConfig, *, folder: str | None, name: str, facts: Mapping[str, object]) -> None:
        own_store = Path(folder or ".").absolute() / "mlflow"
        uri = config.mlflow_uri or os.environ.get("MLFLOW_TRACKING_URI") or own_store.as_uri()
        if uri.startswith("file:"):
            # MLflow refuses its store of plain files unless told; its databases need packages that its small edition has not.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self.status = "completed"
        """How the run ended, once it has."""
        self._entities: Any = importlib.import_module("mlflow.entities")
        self._client: Any = importlib.import_module("mlflow.tracking").MlflowClient(tracking_uri=uri)
        self._run_id = self._find_run(None if folder is None else Path(folder) / _ID_FILE, config.project, name)
        if not self._client.get_run(self._run_id).data.params:
            for key, value in facts.items():
                self._client.log_param(self._run_id, key, value)

    def _find_run(self, id_file: Path | None, project: str, name: str) -> str:
        """The run that this directory had before, or a new one."""
        if id_file is not None and id_file.is_file():
            run_id = id_file.read_text().strip()
            self._client.update_run(run_id, status="RUNNING")
            return run_id
        found = self._client.get_experiment_by_name(project)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(project)
        run_id = str(self._client.create_run(experiment, run_name=name).info.run_id)
        if id_file is not None:
            replace_text(id_file, run_id + "\n")
        return run_id

    def log(self, values: dict[str, float], step: int) -> None:
        """Add points to MLflow's curves."""
        now = int(time.time() * 1000)
        points = [self._entities.Metric(key, float(value), now, step) for key, value in values.items()]
        for first in range(0, len(points), _MOST_AT_ONCE):
            self._client.log_batch(self._run_id, metrics=points[first : first + _MOST_AT_ONCE])

    def close(self) -> None:
        """Mark the run as over, and how it ended."""
        self._client.set_terminated(self._run_id, status=_MLFLOW_ENDS.get(self.status, "FAILED"))


class WandbLogger:
    """Logs to Weights & Biases: to files in the run directory, or over the network where the recipe allows that.

    Args:
        config: of the recipe.
        folder: the run directory.
        name: of the run.
        facts: settings, which become the run's config.
    """

    def __init__(self, config: LogConfig, *, folder: str, name: str, facts: Mapping[str, object]) -> None:
        self.status = "completed"
        """How the run ended, once it has."""
        self._wandb: Any = importlib.import_module("wandb")
        path = str(Path(folder).absolute())
        self._run: Any = self._wandb.init(
            project=config.project,
            name=name,
            dir=path,
            config=dict(facts),
            mode=config.wandb_mode,
            # The same for the same directory, so that a resumed run goes on in the same curves.
            id=hashlib.sha256(path.encode()).hexdigest()[:16],
            resume="allow" if config.wandb_mode == "online" else None,
            settings=self._wandb.Settings(silent=True, console="off"),
        )
        # Its own step may not go back, and a checkpoint is told of after later steps.
        self._run.define_metric("*", step_metric="step")

    def log(self, values: dict[str, float], step: int) -> None:
        """Add points to the run's curves."""
        self._run.log({**values, "step": step})

    def close(self) -> None:
        """Write what is left, and end the process that writes it."""
        self._run.finish(exit_code=int(self.status != "completed"))
        self._wandb.teardown()
