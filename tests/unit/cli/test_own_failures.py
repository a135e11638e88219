"""The user's own functions that raise: one message with the line of theirs, exit code 2, whichever verb called them."""

import pytest

pytestmark = pytest.mark.timeout(120)
MODULE = """
import torch
from torch.utils.data import TensorDataset

def build():
    raise RuntimeError("no such file: weights.pt")

def good():
    return torch.nn.Linear(4, 2)

def data():
    return TensorDataset(torch.zeros(8, 4), torch.zeros(8, 2))

def torn():
    return helper()

def helper():
    return {}["train"]

class Short:
    def __len__(self):
        return 8
    def __getitem__(self, index):
        raise IndexError("torn record")
"""


def recipe(model, data):
    own = "[train]\nsteps = 2\nglobal_batch = 4\n"
    return f"[model]\nbuild = 'mods:{model}'\n[data]\nbuild = 'mods:{data}'\nvalidation = 0\ntest = 0\n{own}"


VERBS = {
    "plan": ("--cluster", "h100:1x2"),
    "train": ("--plan", "dp=2"),
    "verify": ("--plan", "dp=2"),
    "simulate": ("--cluster", "h100:1x2", "--plan", "dp=2"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_build_that_raises_is_a_wrong_request(shoal, tmp_path, verb):
    """It counted as unforeseen: exit 1, and advice to look at a traceback."""
    (tmp_path / "mods.py").write_text(MODULE)
    (tmp_path / "own.toml").write_text(recipe("build", "data"))
    done = shoal(verb, "own.toml", *VERBS[verb], timeout=100)
    assert done.returncode == 2, done.stderr
    told = f"model.build = 'mods:build' failed: RuntimeError: no such file: weights.pt ({tmp_path}/mods.py:6)"
    assert told in done.stderr and "not foreseen" not in done.stderr and not (tmp_path / "runs" / "own-1").exists()


@pytest.mark.parametrize(
    ("data", "told", "line"),
    [
        ("torn", "data.build = 'mods:torn' failed: KeyError: 'train'", 18),
        (
            "Short",
            "data.build = 'mods:Short': the first sample of the train split (sample 4 of the dataset) failed: "
            "IndexError: torn record",
            24,
        ),
    ],
)
@pytest.mark.parametrize("verb", ["plan", "train"])
def test_data_that_raise_are_a_wrong_request(shoal, tmp_path, verb, data, told, line):
    (tmp_path / "mods.py").write_text(MODULE)
    (tmp_path / "own.toml").write_text(recipe("good", data))
    done = shoal(verb, "own.toml", *VERBS[verb])
    assert done.returncode == 2, done.stderr
    assert f"{told} ({tmp_path}/mods.py:{line})" in done.stderr and "not foreseen" not in done.stderr
