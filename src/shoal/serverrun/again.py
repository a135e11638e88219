"""A command that is started again when it fails: for processes that nobody else watches, on machines of their own.

What ends it in order ends it for good: it is done (0), its request was wrong (2), or somebody stopped it.
"""

import contextlib
import itertools
import os
import signal
from collections.abc import Callable, Sequence
from functools import partial

from shoal.core.errors import EXIT_DONE, EXIT_SIGINT, EXIT_SIGTERM, EXIT_WRONG_REQUEST
from shoal.launch.blame import name_signal
from shoal.launch.forkclient import ForkClient
from shoal.launch.process import Process, Streams
from shoal.launch.supervisor import Command, SignalInbox, Supervisor

_IN_ORDER = (EXIT_DONE, EXIT_WRONG_REQUEST, EXIT_SIGINT, EXIT_SIGTERM)
_TURN_SECONDS = 1.0


def run_again(
    first: Sequence[str],
    later: Sequence[str],
    *,
    name: str,
    restarts: int,
    tell: Callable[[str], None],
) -> int:
    """Run a command to its end, and again when it fails; its last exit code.

    Signals to this process go to the command, which dies with this process.

    Args:
        first: the command.
        later: what is started in its place after it has failed.
        name: what messages call it.
        restarts: how often it is started again.
        tell: takes a line for people.
    """
    environment = dict(os.environ)
    with SignalInbox() as inbox, contextlib.closing(ForkClient([], environment)) as client:
        for number in itertools.count():
            supervisor = Supervisor(client, environment=environment)
            try:
                process = supervisor.start(
                    Command(name=name, argv=list(later if number else first)), Streams(stdout=1, stderr=2)
                )
                supervisor.watch(inbox, partial(_pass_on, inbox, process))
                while supervisor.running:
                    supervisor.turn(_TURN_SECONDS)
                supervisor.unwatch(inbox)
            finally:
                supervisor.close()
            code = process.exit_code
            assert code is not None, "the supervisor has seen its end"
            if code in _IN_ORDER or process.signals_sent or number == restarts:
                return code if code >= 0 else 128 - code
            how = f"was killed by {name_signal(-code)}" if code < 0 else f"failed with exit code {code}"
            tell(f"{name} {how}; starting it again, {restarts - number - 1} restarts left")
    raise AssertionError("starts are counted without end")


def _pass_on(inbox: SignalInbox, process: Process) -> None:
    for number in inbox.take():
        process.send(signal.Signals(number))
