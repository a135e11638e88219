"""A callback that ends processes of an elastic run where a test says, as a machine does where nobody says."""

import os
import signal

from shoal.engine.hooks import Hook


class Deaths(Hook):
    """Ends this process where ``DEATHS`` says so: ``rank 1@5:gradients`` in the fifth step, before its update."""

    def __init__(self):
        self._member = os.environ.get("SHOAL_MEMBER", "")
        self._deaths = [one for one in os.environ.get("DEATHS", "").split(";") if one]

    def _look(self, step, point):
        place = f"{self._member}@{step + 1}:{point}"
        for death in self._deaths:
            if death == place:
                os.kill(os.getpid(), signal.SIGKILL)
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
