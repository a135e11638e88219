"""Real ranks that save together: processes with torch and gloo, told line by line what to do and asked what happened.

A rank only does what it is told, so a test can hold one back for as long as it likes and needs no sleep. The script at the end
of this file is what each process runs.
"""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

PATIENCE_SECONDS = 60.0


class Rank:
    """One rank. ``tell`` sends a line, ``hear`` waits for its answer."""

    def __init__(
        self, folder, rank, world_size, *, deadline_s=30.0, keep=3, elements=2000, root=None, under=(), place=None
    ):
        self.rank = rank
        settings = {
            "rank": rank,
            "world_size": world_size,
            "store": str(folder / "store"),
            "root": str(root or folder / "checkpoints"),
            "deadline_s": deadline_s,
            "keep": keep,
            "elements": elements,
            "place": place,
        }
        if place is not None:
            # A disk of its own.
            settings["root"] = str(folder / f"h{rank + 1}" / "checkpoints")
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
        with contextlib.suppress(BrokenPipeError):
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


CHANGES = ("mkdir", "write", "writev", "fsync", "rename", "unlink", "rmdir", "link")


def die_at(count):
    """Kill this process before the call of this number, from now on, that changes the disk; a count beyond them kills nobody."""
    left = [count]

    def dying(call):
        def act(*arguments, **options):
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return call(*arguments, **options)

        return act

    real_open = os.open

    def open_dying(path, flags, *arguments, **options):
        return (dying(real_open) if flags & os.O_CREAT else real_open)(path, flags, *arguments, **options)

    for name in CHANGES:
        setattr(os, name, dying(getattr(os, name)))
    os.open = open_dying
    # What is written to an address goes through the library's own files.
    from shoal.checkpoint.places.address import ObjectStore

    real_opened = ObjectStore.opened

    @contextlib.contextmanager
    def opened_dying(store, mode, *names):
        with real_opened(store, mode, *names) as file:
            yield types.SimpleNamespace(read=file.read, write=dying(file.write) if "w" in mode else None)

    ObjectStore.opened = opened_dying
    for name in ("put", "remove", "make_folder"):
        setattr(ObjectStore, name, dying(getattr(ObjectStore, name)))


def lie_once():
    """Alter a byte of the next chunk that this process gives to another."""
    from shoal.checkpoint.places import carry

    honest = carry._read

    def lie(*arguments):
        carry._read = honest
        data = honest(*arguments)
        data[-1] ^= 1
        return data

    carry._read = lie


def serve(settings):
    """The life of one rank: one command per line, one JSON answer per command."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from shoal.checkpoint.config import CheckpointConfig
    from shoal.checkpoint.places.opening import open_storage
    from shoal.checkpoint.reader import read
    from shoal.checkpoint.saver import Saver
    from shoal.comm.world import World
    from shoal.core.place import Place

    torch.set_num_threads(1)
    rank, world_size = settings["rank"], settings["world_size"]
    store = dist.FileStore(settings["store"], world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    events = []
    world = World(
        Place(rank=rank, world_size=world_size), device=torch.device("cpu"), deadline_seconds=settings["deadline_s"]
    )
    world.group, world.save_group = dist.group.WORLD, group
    config = CheckpointConfig(keep=settings["keep"], place=settings["place"] or "auto")
    opened = open_storage(Path(settings["root"]), world=world, config=config) if settings["place"] else None
    saver = Saver(
        Path(settings["root"]),
        rank=rank,
        world_size=world_size,
        group=group,
        config=config,
        plan=f"dp={world_size}",
        deadline_s=settings["deadline_s"],
        report=lambda event: events.append(event.as_dict()),
        storage=None if opened is None else opened.storage,
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
        elif command == "load":
            brought = opened.storage.bring(world, None)
            found = None
            if brought.path is not None:
                loaded = read(brought.path, expect=brought.manifest).tensors
                dist.barrier()
                found = sorted({float(value) for name in tensors for value in loaded[name].unique()})
            opened.storage.give_back(brought)
            answer([brought.step, found, [list(one) for one in brought.refused]])
        elif command == "die_at":
            die_at(int(words[0]))
            answer("will die")
        elif command == "lie":
            lie_once()
            answer("will lie")
        elif command == "events":
            answer(events)
        elif command == "close":
            saver.close()
            answer("closed")
    os._exit(0)


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
