"""``shoal init``: a first recipe and a module and dataset of one's own, small enough to read and complete enough to run."""

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.console import JsonFile, check_result_file, write_result
from shoal.core.errors import RequestError

RECIPE_NAME = "recipe.toml"
SCRIPT_NAME = "starter.py"

RECIPE = """\
# Start it here, in this folder:      shoal train recipe.toml
# Every key, with its default:        shoal train --help-recipe
# What would run, without running it: shoal train recipe.toml --dry-run
plan = "dp=2"                     # two processes that share every batch; --plan overrides it

[model]
build = "starter:build"           # your function, in starter.py; or name = "gpt", "cnn", "mlp", "seq2seq"
args = { hidden = 64 }

[data]
build = "starter:dataset"         # your Dataset; or source = "stdlib", "text", "tokens", "digits", "synthetic"
args = { samples = 4096, noise = 0.05 }

[train]
steps = 300
global_batch = 64
seed = 1
precision = "float32"

[optim]
name = "adamw"
lr = 5e-3
schedule = "cosine"
warmup = 20

[eval]
every = 100

[checkpoint]
every = 100
"""

SCRIPT = '''\
"""A model and a dataset of your own: plain PyTorch, nothing of Shoal in it. recipe.toml names the two functions below."""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class Spirals(Dataset):
    """Points on two spirals; the class of a point is the arm that it lies on."""

    def __init__(self, samples: int, noise: float) -> None:
        draw = torch.Generator().manual_seed(0)  # every process must see the same points
        self.arms = torch.randint(2, (samples,), generator=draw)
        radius = torch.rand(samples, generator=draw) + 0.1
        angle = 2.0 * torch.pi * radius + torch.pi * self.arms
        clean = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
        self.points = clean + noise * torch.randn(samples, 2, generator=draw)

    def __len__(self) -> int:
        return len(self.arms)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index], self.arms[index]


def dataset(samples: int, noise: float) -> Dataset:
    """The data; Shoal keeps a part of it for validation and a part for the test."""
    return Spirals(samples, noise)


def build(hidden: int) -> nn.Module:
    """The model: it takes a batch of points and gives a score for each arm."""
    return nn.Sequential(nn.Linear(2, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 2))
'''


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write into; made if it is not there.")],
    json: JsonFile = None,
) -> None:
    """Write a starter recipe and a script with a model and a dataset of your own into DIR; never overwrite."""
    check_result_file(json)
    written = write_starter(folder)
    for path in written:
        print(path)
    print(f"now: cd {folder} && shoal train {RECIPE_NAME}")
    write_result(json, {"folder": folder, "files": written})


def write_starter(folder: Path) -> list[Path]:
    """Write both files, or neither when one of them is there already.

    Raises:
        RequestError: one is there, or the folder cannot be written to.
    """
    texts = {folder / RECIPE_NAME: RECIPE, folder / SCRIPT_NAME: SCRIPT}
    taken = [str(path) for path in texts if path.exists() or path.is_symlink()]
    if taken:
        raise RequestError(
            f"{' and '.join(taken)} already there, nothing written; name another folder, or move them away"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            # "x": a file that appeared since the look above is not overwritten either.
            with path.open("x") as file:
                file.write(text)
    except OSError as error:
        raise RequestError(f"cannot write into {folder}: {error.strerror or error}; name another folder") from error
    return list(texts)
