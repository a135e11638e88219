"""A callback that ends processes of an elastic run where a test says, as a machine does where nobody says."""

import itertools
import os
import signal
import time

from shoal.comm.leaving.connections import shut_connections
from shoal.comm.store import recordfile
from shoal.engine.hooks import Hook
from shoal.trainer.elastic import rank


class Deaths(Hook):
    """Ends this process where ``DEATHS`` says so: ``rank 1@5:gradients`` in the fifth step, before its update; ``rank
    1@2:connect`` while the ranks of the view of epoch 2 connect, ``rank 1@2:connected`` when they have."""

    def __init__(self):
        self._member = os.environ.get("SHOAL_MEMBER", "")
        self._deaths = [one for one in os.environ.get("DEATHS", "").split(";") if one]
        for death in self._deaths:
            member, _, place = death.partition("@")
            epoch, _, point = place.partition(":")
            if member == self._member and point in ("connect", "torn"):
                _die_on_the_way(f"epoch-{epoch}/", point)
            if member == self._member and point == "connected":
                _die_when_connected(int(epoch))

    def _look(self, step, point):
        place = f"{self._member}@{step + 1}:{point}"
        for death in self._deaths:
            if death == place:
                os.kill(os.getpid(), signal.SIGKILL)
            if death == f"{self._member}@0:{point}:burn":
                _burn(0.05)
            if death == f"{self._member.partition(',')[0]}@0:{point}:pace":
                time.sleep(0.1)
            if death == f"{place}:hang-up":
                shut_connections()
            if death == f"{place}:stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if death == f"{place}:agent":
                os.kill(_agent(), signal.SIGKILL)
            if death == f"{place}:host-stop":
                os.kill(_agent(), signal.SIGSTOP)
                os.kill(os.getpid(), signal.SIGSTOP)

    def on_step_start(self, step, batch):
        self._look(step, "start")

    def on_microbatch(self, step, index, loss):
        self._look(step, "microbatch")

    def on_gradients(self, step, parameters, loss_scale):
        self._look(step, "gradients")

    def on_update(self, step, result):
        self._look(step, "update")

    def on_evaluation(self, step, found):
        self._look(step - 1, "evaluation")

    def on_save(self, step):
        self._look(step - 1, "save")


def _burn(seconds):
    """Keep the processor busy for so long."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def _die_on_the_way(prefix, point):
    """Die while the ranks of a view connect: after this rank has told its address, or while it writes it."""
    check, write = recordfile.RecordFileStore.check, recordfile.RecordFileStore._write

    def check_and_die(store, keys):
        if any(key.startswith(prefix) for key in keys):
            os.kill(os.getpid(), signal.SIGKILL)
        return check(store, keys)

    def write_and_die(store, key, value):
        size = os.fstat(store._file).st_size
        write(store, key, value)
        if key.startswith(prefix):
            os.ftruncate(store._file, size + 20)
            os.kill(os.getpid(), signal.SIGKILL)

    if point == "connect":
        recordfile.RecordFileStore.check = check_and_die
    else:
        recordfile.RecordFileStore._write = write_and_die


def _die_when_connected(epoch):
    """Die where ranks of several hosts tell each other their addresses, which is the first that they do together in a view."""
    tell, views = rank.gather_texts, itertools.count(1)

    def tell_or_die(world, text):
        if next(views) == epoch:
            os.kill(os.getpid(), signal.SIGKILL)
        return tell(world, text)

    rank.gather_texts = tell_or_die


def _agent():
    """Whatever started this rank's fork server, or this rank: the agent of its host, by its command line."""
    pid = os.getpid()
    while pid > 1:
        with open(f"/proc/{pid}/stat") as file:
            pid = int(file.read().rpartition(")")[2].split()[1])
        with open(f"/proc/{pid}/cmdline") as file:
            if "shoal.launch.hosts.agent" in file.read():
                return pid
    raise AssertionError("no agent has started this rank")
