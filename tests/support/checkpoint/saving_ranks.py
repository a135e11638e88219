"""Real ranks that save together: processes with torch and gloo, told line by line what to do and asked what happened.

A rank only does what it is told, so a test can hold one back for as long as it likes and needs no sleep. The script at the end
of this file is what each process runs.
"""

import json
import os
import selectors
import subprocess
import sys
import time
from pathlib import Path

PATIENCE_SECONDS = 60.0


class Rank:
    """One rank. ``tell`` sends a line, ``hear`` waits for its answer."""

    def __init__(self, folder, rank, world_size, *, deadline_s=30.0, keep=3, elements=2000, root=None, under=()):
        self.rank = rank
        settings = {
            "rank": rank,
            "world_size": world_size,
            "store": str(folder / "store"),
            "root": str(root or folder / "checkpoints"),
            "deadline_s": deadline_s,
            "keep": keep,
            "elements": elements,
        }
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        # Not at the top: a rank that is an interpreter of its own finds no other module of the tests.
        from support.processes import warm

        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        if under or not warm.can_fork(environment):
            words = [*map(str, under), sys.executable, __file__, json.dumps(settings)]
            self.process = subprocess.Popen(words, env=environment, **streams)
        else:
            module = "support.checkpoint.saving_ranks"
            self.process = warm.ForkedCommand([json.dumps(settings)], module=module, env=environment, **streams)
        self._buffer = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.process.stdout, selectors.EVENT_READ)

    def tell(self, *words):
        self.process.stdin.write((" ".join(map(str, words)) + "\n").encode())
        self.process.stdin.flush()

    def hear(self):
        """The next answer; None when the rank is dead."""
        end = time.monotonic() + PATIENCE_SECONDS
        while b"\n" not in self._buffer:
            assert self._selector.select(end - time.monotonic()), (
                f"rank {self.rank} did not answer in {PATIENCE_SECONDS:g} s"
            )
            received = os.read(self.process.stdout.fileno(), 65536)
            if not received:
                return None
            self._buffer += received
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)

    def ask(self, *words):
        self.tell(*words)
        return self.hear()

    def end(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        self._selector.close()


class Ranks(list):
    """All ranks of a run, in a ``with`` block: none is left behind."""

    def __init__(self, folder, world_size=2, *, under=None, **settings):
        super().__init__(
            Rank(folder, rank, world_size, under=(under or {}).get(rank, ()), **settings) for rank in range(world_size)
        )

    def __enter__(self):
        try:
            assert [rank.hear() for rank in self] == ["ready"] * len(self)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for rank in self:
            rank.end()

    def ask(self, *words):
        for rank in self:
            rank.tell(*words)
        return [rank.hear() for rank in self]


def serve(settings):
    """The life of one rank: one command per line, one JSON answer per command."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from shoal.checkpoint.config import CheckpointConfig
    from shoal.checkpoint.saver import Saver

    torch.set_num_threads(1)
    rank, world_size = settings["rank"], settings["world_size"]
    store = dist.FileStore(settings["store"], world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    events = []
    saver = Saver(
        Path(settings["root"]),
        rank=rank,
        world_size=world_size,
        group=group,
        config=CheckpointConfig(keep=settings["keep"]),
        plan=f"dp={world_size}",
        deadline_s=settings["deadline_s"],
        report=lambda event: events.append(event.as_dict()),
    )
    tensors = {f"weights/{index}": torch.zeros(settings["elements"]) for index in range(4)}
    local = {f"rng/rank-{rank:03d}/torch": torch.full((16,), rank, dtype=torch.uint8)}

    def answer(value):
        sys.stdout.write(json.dumps(value) + "\n")
        sys.stdout.flush()

    answer("ready")
    for line in sys.stdin:
        command, *words = line.split()
        if command == "fill":
            for tensor in tensors.values():
                tensor.fill_(float(words[0]))
            answer("filled")
        elif command == "save":
            saver.save(int(words[0]), tensors, {"word": words[1:]}, local)
            answer("returned")
        elif command == "wait":
            outcome = saver.wait()
            answer(None if outcome is None else outcome.as_dict())
        elif command == "events":
            answer(events)
        elif command == "close":
            saver.close()
            answer("closed")
    os._exit(0)


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
