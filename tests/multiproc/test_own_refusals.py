"""What the user's own parts get wrong, from outside: one message, exit code 2, and nothing started or left behind."""

import pytest

MODULE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def data(): return TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
class Named(TensorDataset):
    def __getitem__(self, i): return {"x": super().__getitem__(i)[0]}, super().__getitem__(i)[1]
def named(): return Named(torch.randn(64, 6), torch.randint(0, 3, (64,)))
def fits(): return nn.Linear(6, 3)
def wide(): return nn.Sequential(nn.Linear(7, 3))
def detached(output, targets): return nn.functional.cross_entropy(output.detach(), targets)
def summed(output, targets): return nn.functional.cross_entropy(output, targets, reduction="sum")
class Torn(TensorDataset):
    def __getitem__(self, i): return super().__getitem__(i if i != 5 else 10**9)
def torn(): return {"train": data(), "validation": Torn(torch.randn(8, 6), torch.zeros(8).long())}
def seldom(output, targets): return torch.zeros(()) if targets[0] == 0 else nn.functional.cross_entropy(output, targets)
"""


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "parts.py").write_text(MODULE)
    path = tmp_path / "own.toml"
    path.write_text(
        '[model]\nbuild = "parts:fits"\n[data]\nbuild = "parts:data"\n[train]\nsteps = 2\nglobal_batch = 8\nthreads = 1\n'
        "[telemetry]\ntensorboard = false\n"
    )
    return path


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            'data.build="parts:named"',
            "it was called with a dict with the keys 'x', none of which its forward pass takes by name",
        ),
        ('model.build="parts:wide"', "in layer '0', Linear(in_features=7"),
        ('model.loss="parts:detached"', "the loss depends on no parameter"),
    ],
)
def test_a_wrong_part_is_told_of_once(shoal, recipe, setting, message):
    done = shoal.run("train", recipe, "--plan", "dp=2", "--run-dir", "run", "--set", setting, expect=2)
    assert done.stderr.count(message) == 1, done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert not (shoal.folder / "run").exists()


def test_a_loss_that_is_a_sum_is_told_of_and_trained(shoal, recipe):
    done = shoal.run("train", recipe, "--plan", "dp=2", "--run-dir", "run", "--set", 'model.loss="parts:summed"')
    assert done.stderr.count("warning: the loss is not the mean over its items") == 1, done.stderr
    assert "reduction='mean'" in done.stderr


@pytest.mark.parametrize("plan", ["dp=2", "dp=2 zero=3"])
def test_a_loss_that_is_a_constant_for_some_microbatches_is_trained(shoal, recipe, plan):
    """Such as one over triplets, where there is none: the run was ended, at whichever step it was."""
    settings = ["--set", 'model.loss="parts:seldom"', "--set", "train.steps=6"]
    shoal.run("train", recipe, "--plan", plan, "--run-dir", "run", *settings)


def test_an_evaluation_that_fails_does_not_lose_what_was_trained(shoal, recipe):
    """The last checkpoint was still being written when the last evaluation failed, and went with it."""
    settings = ["--set", 'data.build="parts:torn"']
    done = shoal.run("train", recipe, "--plan", "dp=2", "--run-dir", "run", *settings, expect=1)
    assert "in phase 'evaluate'" in done.stderr, done.stderr
    assert [path.name for path in (shoal.folder / "run" / "checkpoints").glob("step-*")] == ["step-00000002"]


def test_a_metric_that_cannot_read_the_batches_is_refused_before_a_step(shoal, recipe):
    """Dict batches without a separate target were trained on until the first evaluation, which then failed."""
    (shoal.folder / "words.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.layer = nn.Linear(4, 3)\n"
        "    def forward(self, x, y):\n        out = self.layer(x)\n"
        "        return {'loss': nn.functional.cross_entropy(out, y), 'out': out}\n"
        "def data(): return [{'x': torch.randn(4), 'y': n % 3} for n in range(64)]\n"
    )
    settings = ('model.build="words:Model"', 'data.build="words:data"', 'eval.metrics=["perplexity"]')
    words = [word for setting in settings for word in ("--set", setting)]
    done = shoal.run("train", recipe, "--plan", "dp=2", "--run-dir", "run", *words, expect=2)
    assert "eval.metrics" in done.stderr and "perplexity" in done.stderr and "Traceback" not in done.stderr
    assert not (shoal.folder / "run").exists()
    shoal.run("train", recipe, "--plan", "dp=1", "--run-dir", "run", *words[:4], "--set", "train.steps=1")
