"""Checkpoints of an earlier version load bit for bit, and its runs go on from them to the weights that it would have ended in.

Each folder under ``checkpoints/`` is a run of four steps that ended after its second one: ``dp=2 zero=1`` and ``pp=2``.
An earlier version wrote them, and the hashes are its own: of all tensors of the checkpoint, and of the weights that its
resumed run ended in.
"""

import hashlib
import shutil
from pathlib import Path

import pytest
import torch

from shoal.checkpoint.reader import read
from support.processes.command import read_events, read_summary

HERE = Path(__file__).parent / "checkpoints"
TENSORS = {
    "zero": "e98b50c9659f35dd18c55b5cef753c1a4dfb3b2cffd8a82aeb656202b2ecea05",
    "pp": "9e48b50a3b07b2dc1b23df2b5d18f7c47b6fbfcb66d2f5dd0aa92e7064bf638e",
}
RESUMED = {
    "zero": "a622cbe18961b629aaf72eadaa9c676c4ecaca1381cd6710f0904d484d5974a4",
    "pp": "3e235165a6a97f535fc8303c4072b3ccfb4722dc05fc7253746faf8f31f91ce7",
}


@pytest.mark.parametrize("name", TENSORS)
def test_every_tensor_is_what_was_saved(name):
    found = read(HERE / name / "checkpoints" / "step-00000002")
    digest = hashlib.sha256()
    for key in sorted(found.tensors):
        digest.update(key.encode())
        digest.update(found.tensors[key].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    assert (found.step, digest.hexdigest()) == (2, TENSORS[name])


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_goes_on_to_the_same_weights(shoal, tmp_path, name):
    run_dir = tmp_path / name
    shutil.copytree(HERE / name, run_dir)
    shoal.run("train", run_dir / "recipe.toml", "--run-dir", run_dir, "--resume")
    summary = read_summary(run_dir)
    assert (summary["status"], summary["steps"], summary["weights_sha256"]) == ("completed", 4, RESUMED[name])
    # A run that begins anew ends in the same weights, whatever is in a checkpoint.
    assert [event["step"] for event in read_events(run_dir, kind="step")] == [3, 4]
