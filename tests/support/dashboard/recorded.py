"""Real runs of every kind, tiny, each recorded once for a test session, whichever worker asks first."""

import fcntl
import os
import signal
from pathlib import Path

from support.processes.command import TINY, Shoal, ranks_of, wait_for_step

RECIPE = TINY.replace("tensorboard = false", "tensorboard = false\nspans_every = 4")
SCRIPT = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

import shoal

inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
dataset = TensorDataset(inputs, (inputs.sum(1) > 0).long())
with shoal.Run(seed=0) as run:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = run.loader(dataset, global_batch=16)
    model, optimizer = run.setup(model, optimizer, loss=nn.CrossEntropyLoss())
    for batch in loader:
        loss = run.forward_backward(batch)
        optimizer.step()
        run.log({"mine": loss})
"""
PLANS = {
    "dp": "dp=2 zero=1",
    "pipeline": "pp=2 schedule=1f1b microbatches=4",
    "servers": "ps=2 workers=2 update=async",
    "islands": "islands=2 sync=local:2",
}
KINDS = (*PLANS, "failed", "script")


def recorded(kind, tmp_path_factory):
    """The directory of a recorded run, which nobody may change.

    Args:
        kind: one of ``KINDS``.
        tmp_path_factory: of pytest.
    """
    # Workers of one session have folders of their own, side by side.
    shared = tmp_path_factory.getbasetemp()
    shared = (shared.parent if os.environ.get("PYTEST_XDIST_WORKER") else shared) / "recorded-runs"
    shared.mkdir(exist_ok=True)
    with (shared / f"{kind}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / f"{kind}.done").exists():
            _record(kind, shared)
            (shared / f"{kind}.done").touch()
    return shared / kind


def _record(kind: str, folder: Path) -> None:
    here = Shoal(folder)
    recipe = folder / f"{kind}.toml"
    try:
        if kind in PLANS:
            recipe.write_text(RECIPE)
            here.run("train", recipe, "--plan", PLANS[kind], "--run-dir", kind, timeout=180)
        elif kind == "script":
            (folder / "script.py").write_text(SCRIPT)
            here.run("run", "script.py", "--plan", "dp=2", "--run-dir", kind, timeout=180)
        else:
            recipe.write_text(RECIPE.replace("steps = 8", "steps = 100000"))
            process = here.start("train", recipe, "--plan", "dp=2", "--run-dir", kind)
            wait_for_step(folder / kind, 5)
            ranks_of(process)[1].send_signal(signal.SIGKILL)
            process.communicate(timeout=120)
            assert process.returncode == 1
    finally:
        here.end()
