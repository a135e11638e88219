"""Candidates of an election as real processes, for tests that kill and pause them.

Run as a script this is one candidate: it campaigns, and while it leads it asks ``is_valid`` as fast as it can, as a center would
before every instruction, and renews when it is time. It tells what it did on standard output, one JSON line each.
"""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.comm.wire.keys import load_keys
from shoal.elastic.election.elector import Deposed, Elector
from shoal.elastic.election.etcd import EtcdLease
from shoal.elastic.election.filelease import FileLease
from shoal.elastic.election.voters import Voters


class Candidate:
    """A process that campaigns, seen from the test."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(arguments, stdout=subprocess.PIPE)
        os.set_blocking(self.process.stdout.fileno(), False)
        self.told: list[dict] = []
        self._rest = ""

    def read(self) -> list[dict]:
        """Everything it told so far."""
        if self.process.stdout.closed:
            return self.told
        try:
            self._rest += os.read(self.process.stdout.fileno(), 1 << 20).decode()
        except BlockingIOError:
            pass
        *lines, self._rest = self._rest.split("\n")
        self.told += [json.loads(line) for line in lines]
        return self.told

    def saw(self, what: str) -> list[dict]:
        """What it told under this word."""
        return [line for line in self.read() if line["what"] == what]

    def send(self, number: signal.Signals) -> float:
        """Send a signal; the time before it was sent, on CLOCK_MONOTONIC."""
        now = time.monotonic()
        self.process.send_signal(number)
        return now

    def end(self) -> None:
        """Kill it and reap it."""
        self.process.kill()
        self.process.wait()
        if not self.process.stdout.closed:
            self.read()
            self.process.stdout.close()


def until(condition, what: str, seconds: float = 20.0) -> None:
    """Wait for a condition, and fail by name."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds:g} s for {what}"
        time.sleep(0.002)


def leader(candidates: list[Candidate], *, above: int = 0) -> Candidate | None:
    """The one that was elected last, under an epoch above this one."""
    led = [(line["epoch"], index) for index, one in enumerate(candidates) for line in one.saw("leads")]
    return candidates[max(led)[1]] if led and max(led)[0] > above else None


def tell(what: str, **more: object) -> None:
    """One line to the test."""
    os.write(1, (json.dumps({"what": what, "at": time.monotonic(), **more}) + "\n").encode())


async def lead(elector: Elector, *, lease_seconds: float) -> None:
    """Lead until deposed; every line tells when the lease was last seen to be valid (``seen``)."""
    epoch = await elector.campaign()
    seen = time.monotonic()
    tell("leads", epoch=epoch, seen=seen)
    renew_at = seen + lease_seconds / 3
    was_valid = True
    try:
        while True:
            # Before the look: a pause between the two then makes this earlier than the truth, never later.
            now = time.monotonic()
            if elector.is_valid():
                seen = now
            elif was_valid:
                tell("invalid", epoch=epoch, seen=seen)
            was_valid = seen == now
            if now >= renew_at:
                await elector.renew()
                tell("renewed", epoch=epoch, seen=seen)
                renew_at = now + lease_seconds / 3
            await asyncio.sleep(0.001)
    except Deposed as error:
        tell("deposed", epoch=epoch, seen=seen, why=str(error), valid=elector.is_valid())


async def stand(elector: Elector, *, lease_seconds: float) -> None:
    """Campaign again and again."""
    while True:
        await lead(elector, lease_seconds=lease_seconds)


async def race(elector: Elector, generator: random.Random) -> None:
    """Lead for a moment, again and again: resign, advance, or die in it."""
    while True:
        epoch = await elector.campaign()
        tell("leads", epoch=epoch)
        for _ in range(generator.choice((0, 0, 1, 3))):
            await asyncio.sleep(generator.uniform(0, 0.002))
            try:
                before = time.monotonic()
                if elector.is_valid():
                    tell("seen", epoch=elector.epoch, seen=before)
                tell("advanced", epoch=await elector.advance())
            except Deposed:
                break
        before = time.monotonic()
        if elector.is_valid():
            tell("seen", epoch=elector.epoch, seen=before)
        if generator.random() < 0.1:
            os.kill(os.getpid(), signal.SIGKILL)
        await elector.resign()


def start_candidate(
    kind: str,
    *,
    name: str,
    lease_seconds: float,
    race_seed: int | None = None,
    before: Sequence[str] = (),
    **more: object,
) -> Candidate:
    """One process that stands, or races.

    Args:
        kind: of the election.
        name: of the candidate.
        lease_seconds: of its lease.
        race_seed: lead for moments only.
        before: a command that runs the process, such as one that enters a network namespace.
        more: what that kind of election needs.
    """
    told = {"kind": kind, "name": name, "lease_seconds": lease_seconds, "race_seed": race_seed, **more}
    return Candidate(*before, sys.executable, __file__, json.dumps(told))


async def main(kind: str, name: str, lease_seconds: float, race_seed: int | None, **more: Any) -> None:
    """One candidate."""
    elector: Elector
    if kind == "folder":
        elector = FileLease(Path(more["folder"]), name=name, address=f"ipc://{name}", lease_seconds=lease_seconds)
    elif kind == "etcd":
        elector = EtcdLease(
            more["url"], key="test/center", name=name, address=f"ipc://{name}", lease_seconds=lease_seconds
        )
    else:
        keys = load_keys(Path(more["keys"])) if more.get("keys") else None
        elector = Voters(
            name=name,
            address=f"ipc://{name}",
            voters=more["voters"],
            ballot=Path(more["ballot"]),
            lease_seconds=lease_seconds,
            keys=keys,
        )
        await elector.start()
    if race_seed is not None:
        await race(elector, random.Random(race_seed))
    await stand(elector, lease_seconds=lease_seconds)


if __name__ == "__main__":
    asyncio.run(main(**json.loads(sys.argv[1])))
