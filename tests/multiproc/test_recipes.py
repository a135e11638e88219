"""The shipped recipes run on two processes, and the models that they train learn."""

import pytest

from support.processes.command import ROOT, read_events, read_summary


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        # 1,617 samples in batches of 64: the last batch has 17, and batch norm is synchronised over the unequal halves.
        ("digits", ("train.epochs=2",)),
        pytest.param("reverse", ("train.steps=20",), marks=pytest.mark.soak),
        # `make demo` trains it whole.
        pytest.param(
            "gpt",
            ("train.steps=8", "eval.samples=32", "eval.every=0", "data.limit_bytes=300000"),
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_shipped_recipe_trains(shoal, name, changes):
    pytest.importorskip("sklearn")
    extra = [word for change in (*changes, "telemetry.tensorboard=false") for word in ("--set", change)]
    shoal.run("train", ROOT / "recipes" / f"{name}.toml", "--run-dir", "run", *extra)
    summary = read_summary(shoal.folder / "run")
    assert summary["status"] == "completed" and summary["world_size"] == 2
    assert summary["final_loss"] < summary["first_loss"]
    if name == "digits":
        steps = read_events(shoal.folder / "run", 0, "step")
        assert steps[-1]["samples"] < 64
        assert read_events(shoal.folder / "run", 0, "evaluated")[-1]["accuracy"] > 0.5


@pytest.mark.soak
def test_compiled_and_eager_learn_alike(shoal, tiny):
    changes = ("--set", "train.steps=3", "--set", "model.layers=1", "--set", "checkpoint.every=0")
    shoal.run("train", tiny, "--run-dir", "eager", *changes)
    shoal.run("train", tiny, "--run-dir", "compiled", *changes, "--set", "train.compile=true", timeout=110)
    eager, compiled = read_summary(shoal.folder / "eager"), read_summary(shoal.folder / "compiled")
    assert compiled["final_loss"] == pytest.approx(eager["final_loss"], rel=1e-4)
    assert compiled["weights_sha256"] != "" and compiled["status"] == "completed"


def test_randomness_that_depends_on_the_number_of_processes_is_said_aloud(shoal):
    (shoal.folder / "mine.py").write_text(
        "import torch\n"
        "class Model(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(8, 2)\n"
        "    def forward(self, x):\n"
        "        return self.layer(x * torch.rand(1))\n"
        "def build():\n"
        "    return Model()\n"
    )
    (shoal.folder / "own.toml").write_text(
        '[model]\nbuild = "mine:build"\n[data]\nsource = "synthetic"\nkind = "classes"\nsamples = 64\n'
        "features = [8]\nclasses = 2\n[train]\nsteps = 2\nglobal_batch = 8\n"
    )
    done = shoal.run("train", "own.toml", "--run-dir", "run")
    assert done.stderr.count("draws random numbers in its forward pass that are not dropout") == 1
