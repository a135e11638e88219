"""Runs of ranks on a store: the weights of a run on the token file, over a resume with versions appended in between."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny.toml"


def shoal(*arguments, code=0):
    done = subprocess.run(
        [sys.executable, "-m", "shoal", *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done.stderr


def train(run, *settings, code=0, resume=False):
    changes = ["train.steps=8", "checkpoint.every=4", "data.limit_bytes=", *settings]
    words = [word for change in changes for word in ("--set", change)]
    told = shoal(
        "train", RECIPE, "--plan", "dp=2", "--run-dir", run, *words, *(["--resume"] if resume else []), code=code
    )
    return told if code else json.loads((run / "summary.json").read_text())["weights_sha256"]


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_run_from_a_store_is_the_run_from_the_token_file(tmp_path):
    ids, store = tmp_path / "ids.npy", tmp_path / "store"
    np.save(ids, np.random.default_rng(0).integers(0, 200, size=60_000).astype("<u2"))
    shoal("data", "build", ids, store, "--block-bytes", 16384, "--workers", 2)
    from_file = train(tmp_path / "file", "data.source=tokens", f"data.path={ids}")
    ours = ("data.source=store", f"data.path={store}")
    assert train(tmp_path / "store-run", *ours) == from_file
    train(tmp_path / "resumed", *ours, "train.steps=4")
    shoal("data", "build", ids, store, "--append")
    assert train(tmp_path / "resumed", *ours, resume=True) == from_file
    # What begins now reads the new version, and a whole store in memory is no other data.
    assert train(tmp_path / "newer", *ours) != from_file
    assert train(tmp_path / "pinned", *ours, "data.version=1", "data.load=whole") == from_file
    block = next(path for path in sorted((store / "blocks").iterdir()))
    block.unlink()
    assert block.name in train(tmp_path / "broken", *ours, code=1)
