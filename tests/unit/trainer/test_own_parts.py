"""Data, model and loss of one's own that do not fit one another are refused before any process starts, with one message."""

from pathlib import Path

import pytest
import torch

from shoal.cli.train import OwnParts
from shoal.core.errors import RequestError
from shoal.trainer.own_parts import OwnPartsHere
from shoal.trainer.request import TrainRequest, prepare

torch.set_num_threads(1)

MODULE = """
import os
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from shoal import Metric

class Rows(Dataset):
    def __init__(self, widths): self.widths = widths
    def __len__(self): return 32
    def __getitem__(self, i): return torch.full((self.widths[i % len(self.widths)],), float(i)), i % 3

def rows(widths=(6,)):
    with open("built", "a") as file: file.write("x")
    return {"train": Rows(widths), "validation": Rows(widths)}

class Net(nn.Module):
    def __init__(self, width, outputs=3):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(width, outputs))
    def forward(self, inputs): return self.body(inputs)

def fits(): return Net(8)
def wide(): return Net(9)
def lazy(): return nn.Sequential(nn.Linear(6, 8), nn.LazyLinear(3))
def classes(): return Net(8, outputs=2)
class Fixed(Net):
    def forward(self, inputs): return super().forward(inputs.view(4, -1))
def fixed(): return Fixed(8)
class Rank(Net):
    def forward(self, inputs): return super().forward(inputs * (1 + int(os.environ["RANK"])))
def rank(): return Rank(8)
class Frozen(Net):
    def forward(self, inputs):
        with torch.no_grad(): return super().forward(inputs)
def frozen(): return Frozen(8)
class Training(Net):
    def forward(self, inputs): return super().forward(inputs) if self.training else None
def training(): return Training(8)

def normed(): return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
def normed_alone(): return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 3))
class Four(Net):
    def forward(self, inputs):
        assert len(inputs) == 4
        return super().forward(inputs)
def four(): return Four(8)

def mean(output, targets): return F.cross_entropy(output, targets)
def detached(output, targets): return F.cross_entropy(output.detach(), targets)
def leaf(output, targets): return F.cross_entropy(output, targets).detach().requires_grad_()
def rows_of(output, targets): return F.cross_entropy(output, targets, reduction="none")
def summed(output, targets): return F.cross_entropy(output, targets, reduction="sum")
def of_four(output, targets):
    assert len(output) == 4
    return F.cross_entropy(output, targets)
def asserts(output, targets): assert False, "never"
class Hits(Metric):
    name = "hits"
    def measure(self, output, targets): return torch.stack([(output.argmax(-1) == targets).sum(), torch.tensor(len(targets))])
    def finish(self, sums): return sums[0] / sums[1]
class Misspelt(Hits):
    def measure(self, output, targets): return output.argmx(-1)
class Unfinished(Hits):
    def finish(self, sums): return "half"
class Whole(Hits):
    def measure(self, output, targets): return 3
def spread(outputs, targets): return float(outputs.std())
def undefined(outputs, targets): return outputs.std() * scale
def of_many(outputs, targets):
    if len(targets) < 30: raise ValueError("needs every class")
    return 1.0
def never(outputs, targets): raise ValueError("no such score")
def now_and_then(output, targets): return output.mean() if (targets == 0).all() else torch.zeros(())
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tried_parts.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def ask(model="fits", loss="mean", widths="[6]", plan="dp=2", train="", own=None):
    path = Path("recipe.toml")
    path.write_text(
        f'plan = "{plan}"\n[model]\nbuild = "tried_parts:{model}"\nloss = "tried_parts:{loss}"\n'
        f'[data]\nbuild = "tried_parts:rows"\nargs = {{ widths = {widths} }}\n[train]\nsteps = 2\nglobal_batch = 8\n{train}\n'
    )
    return prepare(TrainRequest(recipe=path), own=own or OwnPartsHere())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"model": "wide"},
            r"mat1 and mat2 .* in layer 'body.2', Linear\(in_features=9.*got \(4, 8\) float32; it was called with \(4, 6\)",
        ),
        ({"widths": "[5]"}, r"in layer 'body.0', Linear\(in_features=6.*got \(4, 5\) float32"),
        (
            {"widths": "[6, 7]"},
            r"has input \(6,\) float32 and target \(\) int64, sample \d+ of the train split has input \(7,\) float32",
        ),
        ({"model": "lazy"}, r"model.build = 'tried_parts:lazy': layer '1' is a LazyLinear, .* nn.Linear\(...\)"),
        (
            {"model": "classes"},
            r"the loss failed: IndexError: Target 2 .*output is \(\d, 2\) float32 and the targets are",
        ),
        ({"model": "frozen"}, "depends on no parameter .*already the model's output does not"),
        ({"loss": "detached"}, "depends on no parameter .*output depends on parameters and the loss does not"),
        ({"loss": "leaf"}, "depends on no parameter"),
        ({"loss": "asserts"}, "the loss failed: AssertionError: never; the model's output is"),
        ({"loss": "rows_of"}, r"the loss returned \(4,\) float32; it must return one number"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, str], message: str) -> None:
    with pytest.raises(RequestError, match=message) as found:
        ask(**changed)
    assert "Traceback" not in str(found.value)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"model": "fixed"},
        {"model": "training"},
        {"model": "rank"},
        {"plan": "ps=1 workers=2"},
        {"model": "four"},
        {"loss": "of_four"},
        {"model": "normed", "train": 'micro_batch = 1\nbatch_norm = "sync"'},
        {"model": "normed_alone", "train": "micro_batch = 1"},
        {"loss": "now_and_then", "train": "micro_batch = 1"},
    ],
)
def test_what_fits_is_not(changed: dict[str, str]) -> None:
    """A module that takes one size of batch, works in training mode, or knows its rank, is one that a run can train."""
    assert not [warning for warning in ask(**changed).warnings if "loss" in warning]


def test_a_loss_that_is_no_mean_is_remarked_on() -> None:
    assert [warning for warning in ask(loss="summed").warnings if "not the mean over its items" in warning]
    assert not ask(loss="summed", plan="dp=1").warnings


@pytest.mark.parametrize("own", [OwnPartsHere, OwnParts])
def test_the_data_is_built_once_before_a_run(own) -> None:
    """It was built for its length, for the trial and for the plan: minutes, where a function reads a folder of files."""
    ask(plan="pp=2 microbatches=2", own=own())
    assert Path("built").read_text() == "x"


def test_another_seed_or_recipe_builds_its_own_data() -> None:
    own = OwnPartsHere()
    ask(own=own)
    ask(own=own, widths="[6, 6]")
    ask(own=own, widths="[6, 6]", train="seed = 7")
    assert Path("built").read_text() == "xxx"


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ("Misspelt", "metric 'hits' failed: AttributeError: .*argmx"),
        ("Unfinished", "metric 'hits' failed: ValueError: could not convert string to float"),
        ("Whole", "metric 'hits': measure returned a int; return a tensor of one dim or of two"),
        ("undefined", "metric 'undefined' failed: NameError"),
    ],
)
def test_a_metric_of_ones_own_that_cannot_work_is_refused_before_a_step(metric: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as found:
        ask(train=f'[eval]\nmetrics = ["tried_parts:{metric}"]')
    assert "eval.metrics" in str(found.value) and "Traceback" not in str(found.value)


def test_a_metric_that_may_need_more_samples_than_were_tried_is_told_of() -> None:
    for metric in ("Hits", "spread"):
        assert not ask(train=f'[eval]\nmetrics = ["tried_parts:{metric}"]').warnings
    (told,) = ask(train='[eval]\nmetrics = ["tried_parts:of_many"]').warnings
    assert "on the first 8 of the validation samples" in told and "needs every class" in told
    with pytest.raises(RequestError, match="no such score"):
        ask(train='[eval]\nsamples = 8\nmetrics = ["tried_parts:never"]')
