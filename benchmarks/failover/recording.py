"""A small GPT for the benchmark beside, and a recorder in every server and worker: what was acknowledged, what was applied, when.

The recorder changes nothing. It wraps three methods of the real roles and writes a line after each of them has done its work,
straight into a file, so that a line outlives a SIGKILL. Times are of the machine's monotonic clock, which all processes share.

    ["kept", time, worker, number, work units]            a worker was told that its push is kept
    ["made", time, server, update, [[worker, number]..]] a server has applied an update to all of its shards
    ["view", time, member, epoch]                       a member goes by a new view

Each is under the name that it has at the moment: a worker that was taken for dead goes on under another.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from torch import nn

from shoal.models.check import DataShape
from shoal.models.config import GptConfig
from shoal.models.gpt import Gpt
from shoal.paramserver.contact import Contact
from shoal.paramserver.worker.client import Client
from shoal.serverrun.server.recorder import ServerRecorder


def build(spec: DataShape, log: str) -> nn.Module:
    """The model. ``log``: the folder for what is recorded; empty for none."""
    if log and "--instance-id" in sys.argv:
        words = dict(zip(sys.argv[1:], sys.argv[2:], strict=False))
        record(Path(log) / f"{words['--name']}.{words['--instance-id']}.jsonl")
    config = GptConfig(layers=2, hidden=128, heads=4, kv_heads=2)
    return Gpt(config, vocab=spec.vocab or 0, sequence=spec.sequence or 0)


def record(path: Path) -> None:
    """Write down what this process does from now on."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def note(*words: Any) -> None:
        os.write(file, json.dumps(words).encode() + b"\n")

    commit, take_update, take_in = Client.commit, ServerRecorder.take_update, Contact._take_in

    async def recorded_commit(self: Client, push: Any) -> bool:
        is_kept = await commit(self, push)
        if is_kept:
            note("kept", time.monotonic(), push.worker, push.number, push.units)
        return is_kept

    async def recorded_update(self: ServerRecorder, server: Any, made: Any, cut: str | None) -> None:
        entries = [[entry.worker, entry.number] for entry in made.entries]
        note("made", time.monotonic(), server.identity, made.number, entries)
        await take_update(self, server, made, cut)

    def recorded_view(self: Contact, heard: Any) -> None:
        before = self.view
        take_in(self, heard)
        if self.view is not None and self.view is not before:
            note("view", time.monotonic(), self._node.instance_id, self.view.epoch)

    Client.commit = recorded_commit  # type: ignore[method-assign]
    ServerRecorder.take_update = recorded_update  # type: ignore[method-assign]
    Contact._take_in = recorded_view  # type: ignore[method-assign]
