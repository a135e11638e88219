"""Recipes of runs that are looked at while they train."""

LIVE = """
plan = "dp=2"
[model]
name = "gpt"
layers = 2
hidden = 32
heads = 4
kv_heads = 2
[data]
source = "stdlib"
sequence = 16
limit_bytes = 200000
[train]
steps = 200
global_batch = 8
threads = 1
[optim]
name = "adamw"
lr = 1e-3
[eval]
samples = 16
[checkpoint]
every = 0
[telemetry]
tensorboard = false
live_seconds = 0.2
"""

HELD = """
import time
from pathlib import Path
from torch import nn

class Held(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += self.training
        while self.calls > 20 and not Path(__file__).with_name("go").exists():
            time.sleep(0.01)
        return super().forward(x)

def build():
    return Held(8, 4)
"""
"""A model that goes on behind its twentieth step when there is a file: a run is followed however quick the machine is."""

_OWN = '[model]\nbuild = "held:build"\n[data]\nsource = "synthetic"\nkind = "classes"\nfeatures = [8]\nclasses = 4\n'
HELD_LIVE = LIVE[: LIVE.index("[model]")] + _OWN + LIVE[LIVE.index("[train]") :]
"""The same with that model."""
