"""A store that grows under a run whose rows go through steps: what was fitted when the run began stays, over resumes too."""

import os

import pytest

from shoal.data.store.writer import build_store
from shoal.telemetry.summaryfile import read_summary
from support.processes.command import ROOT, read_events
from support.training.appends import rows

RECIPE = """
plan = "dp=2"
callbacks = ["support.training.appends:Appends"]
[model]
name = "mlp"
[data]
source = "store"
path = "{store}"
target = "label"
follow = true
validation = 0
test = 0
[[data.prepare]]
step = "scale"
columns = ["b"]
[train]
steps = 10
global_batch = 6
threads = 1
seed = 3
[optim]
name = "adamw"
lr = 1e-2
"""
PATH = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_resume_after_a_version_was_taken_up_ends_in_the_same_weights(shoal):
    """The version that comes has another mean: a fit anew, on a resume or by another rank, would be another run."""

    def train(name, *words, append=""):
        folder = shoal.folder / f"store-{name}"
        if not folder.exists():
            build_store([rows(0, 20)], str(folder))
        path = shoal.folder / f"{name}.toml"
        path.write_text(RECIPE.format(store=folder))
        environment = {"PYTHONPATH": PATH, "APPEND": append, "STORE": str(folder)}
        shoal.run("train", path, "--run-dir", name, *words, environment=environment)
        return read_summary(shoal.folder / name)

    whole = train("whole", append="2:20:31")
    train("parts", "--set", "train.steps=7", append="2:20:31")
    parts = train("parts", "--resume")
    assert parts["weights_sha256"] == whole["weights_sha256"]
    for name in ("whole", "parts"):
        receipts = read_events(shoal.folder / name, 0, "epoch_receipt")
        assert [(one["rows"], one["ok"]) for one in receipts] == [(20, True), (31, True)]
        assert '"num_rows": 20' in (shoal.folder / name / "data" / "fitted.json").read_text()
