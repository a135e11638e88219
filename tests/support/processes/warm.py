"""The ``shoal`` command as a fork of a process that has imported torch and Shoal: it begins in milliseconds instead of seconds.

One such process serves a test session (the product's own fork server, ``launch/forkserver.py``), from its first command on. A
forked command is a child of the test as one that ``subprocess`` started, with its own session, folder, environment and standard
streams. It runs ``python -m shoal`` to its end, so what differs from a fresh interpreter is what was imported before, and that
nothing is torn down after the functions of ``atexit``.

Where the command starts a fork server itself, that is a fork of the command as it began. Two things stay interpreters of their
own: a command in an environment that has to be there before torch is imported, and the reference of a proof, which must not
have imported what it judges. Tests of the start and end of the command itself ask for an interpreter (``real=True``).
"""

import atexit
import contextlib
import faulthandler
import importlib
import inspect
import json
import os
import pkgutil
import runpy
import socket
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import shoal
from shoal.comm.parentdeath import die_with_parent
from shoal.launch import forkclient, forkserver
from shoal.launch.child import show_command_line
from shoal.launch.forkclient import PRELOAD_OPTIMIZER, ForkClient
from shoal.launch.process import Process, Streams

TESTS = Path(__file__).resolve().parents[2]
WARM = (f"{__name__}:import_shoal", PRELOAD_OPTIMIZER)
READ_BEFORE = ("PYTHON", "OMP_", "MKL_", "OPENBLAS_", "ONEDNN_", "DNNL_", "KMP_", "LD_", "MALLOC_")
"""Variables that an interpreter or a library reads when it begins."""
TAKEN_OVER = {"PYTHONPATH", "PYTHONFAULTHANDLER", "PYTHONUNBUFFERED", "OPENBLAS_NUM_THREADS"}
"""What a fork does by itself; the last is 1 in every fork server."""
TAKEN_OVER |= {"KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}
"""scikit-learn sets these when it is imported, for an OpenMP that torch does not use."""
_start_interpreter = forkclient.start_interpreter
REFERENCE = "shoal.verify.oracle.process"


class ForkedCommand(subprocess.Popen):
    """``shoal ARGUMENTS``, with the options of ``subprocess.Popen`` of which ``args`` are the command's own arguments.

    With another ``module``, that one is run as ``__main__``; one that ends in ``.py`` is a script.
    """

    def __init__(self, args, *, module="shoal", **options):
        self._module = module
        super().__init__(args, **options)

    def _execute_child(self, *given):
        asked = inspect.signature(subprocess.Popen._execute_child).bind(self, *given).arguments
        ends = {name: asked[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")}
        client, environment = _session_client(), asked["env"] or os.environ
        order = make_order(self._module, asked["args"], folder=asked["cwd"] or ".")
        streams = [ends["p2cread"], ends["c2pwrite"], ends["errwrite"]]
        stdin, stdout, stderr = (number if given == -1 else given for number, given in enumerate(streams))
        try:
            process = client.start(
                __name__,
                [json.dumps(order)],
                environment=environment,
                streams=Streams(stdin=stdin, stdout=stdout, stderr=stderr),
            )
        finally:
            self._close_pipe_fds(*ends.values())
        assert process is not None, client.problem
        # Its end is for this object to wait for.
        self.pid, self._child_created = process.pid, True
        os.close(process.descriptor)


def can_fork(environment):
    """Whether a command with these variables can be forked."""
    if not hasattr(os, "pidfd_open"):
        return False
    known = _session_client().environment
    changed = {name for name in known.keys() | environment.keys() if known.get(name) != environment.get(name)}
    return not any(name.startswith(READ_BEFORE) for name in changed - TAKEN_OVER)


class SessionClient(ForkClient):
    """Remembers its environment, and whose it is."""

    def __init__(self, environment):
        super().__init__(WARM, environment)
        self.environment = dict(environment)
        with mock.patch.object(forkclient, "start_interpreter", _start_interpreter):
            self.open()
        self.wait()
        assert not self.problem, self.problem
        self.owner = os.getpid()


def make_order(module, arguments, *, folder="."):
    """What a fork is told of its task, for ``main``."""
    return {"module": module, "arguments": list(arguments), "folder": os.path.abspath(folder)}


_client: SessionClient | None = None
_environment: dict[str, str] = {}


def remember_environment():
    """Take the variables of the warm process from this one, now: a test that asks for it first may have set others."""
    _environment.clear()
    _environment.update(os.environ)


def _session_client():
    global _client
    if _client is None or _client.owner != os.getpid():
        paths = [str(TESTS), _environment.get("PYTHONPATH", "")]
        environment = dict(_environment)
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        _client = SessionClient(environment)
        atexit.register(_client.close)
    return _client


def server_pids():
    """The process that commands are forked from, if there is one."""
    process = _client._server if _client is not None else None
    return {process.pid} if process is not None else set()


def start_interpreter(arguments, *, environment, descriptor):
    """What the fork servers of this process's own pools are started by: forks, as those of forked commands are."""
    _, module, *rest = arguments
    if not can_fork(environment):
        return _start_interpreter(arguments, environment=environment, descriptor=descriptor)
    refuse_reference(rest)
    order = make_order(module, rest)
    with open(os.devnull, "r+b") as nowhere:
        streams = Streams(stdout=nowhere.fileno(), stderr=nowhere.fileno())
        options = {"environment": environment, "streams": streams, "descriptors": (descriptor,)}
        found = _session_client().start(__name__, [json.dumps(order)], **options)
    assert found is not None, _session_client().problem
    return found


def refuse_reference(modules):
    """Keep the reference out of a fork server: the caller starts an interpreter then."""
    if REFERENCE in modules:
        raise OSError("the reference has to be an interpreter of its own")


# ---- in the fork


def import_shoal():
    """Import all of Shoal, and torch with it."""
    for module in pkgutil.walk_packages(shoal.__path__, "shoal."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


_LIBRARIES = [path for path in sys.path if path not in (str(TESTS), os.getcwd(), "")]


def main():
    """Be a ``shoal`` command, a fork server, or what a module of tests is as ``__main__``."""
    order = json.loads(sys.argv[1])
    module, arguments = order["module"], order["arguments"]
    os.chdir(order["folder"])
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    is_script = module.endswith(".py")
    first = os.path.dirname(os.path.abspath(module)) if is_script else order["folder"]
    sys.path[:] = [first, *given, *(path for path in _LIBRARIES if path not in given)]
    show_command_line([sys.executable, *([] if is_script else ["-m"]), module, *arguments])
    sys.argv = [module, *arguments]
    if module == forkserver.__name__:
        _prepare_for_ranks()
        return forkserver.main()
    if module == "shoal" or is_script:
        forkclient.FEWEST_TO_FORK = 1
        forkclient.start_interpreter = _interpreters_of(_fork_template())
    try:
        if is_script:
            runpy.run_path(module, run_name="__main__")
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()


def _fork_template():
    """A fork of this process as it is now, from which its fork servers are forked; it waits, and dies with this one."""
    client = ForkClient(("shoal",), os.environ)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    starter = os.getpid()
    pid = os.fork()
    if pid == 0:
        die_with_parent(starter)
        os.setsid()
        ours.close()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nowhere, number)
        _prepare_for_ranks()
        sys.argv = ["", str(theirs.fileno())]
        with contextlib.suppress(BaseException):
            forkserver.main()
        os._exit(0)
    theirs.close()
    client._socket, client._server, client._owner = ours, Process(pid), starter
    return client


def _prepare_for_ranks():
    """Do what the variables PYTHONFAULTHANDLER and PYTHONUNBUFFERED ask of an interpreter: ranks have both."""
    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)


def _interpreters_of(template):
    def start_interpreter(arguments, *, environment, descriptor):
        _, module, *rest = arguments
        refuse_reference(rest)
        if environment.get("OMP_NUM_THREADS") == "1":
            with open(os.devnull, "r+b") as nowhere:
                streams = Streams(stdout=nowhere.fileno(), stderr=nowhere.fileno())
                options = {"environment": environment, "streams": streams, "descriptors": (descriptor,)}
                if (found := template.start(module, rest, **options)) is not None:
                    return found
        return _start_interpreter(arguments, environment=environment, descriptor=descriptor)

    return start_interpreter
