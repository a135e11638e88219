"""A shell for the commands of documents, in which ``shoal``, ``python`` and ``torchrun`` are forks of the warm process.

In front of its ``PATH`` stand programs of these names that hand their arguments, folder, environment and standard streams to the
test over a socket, and end with the code that comes back. So a page is run by a real shell, with its pipes, variables and jobs,
and does not pay for importing torch at every command.
"""

import array
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

from support.processes import warm
from support.processes.command import python_of_session

SHIM = """#!{python} -IS
import array, json, os, signal, socket, sys
link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
link.connect({address!r})
order = json.dumps([{name!r}, sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
link.sendmsg([len(order).to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: link.send(bytes([number])))
link.sendall(order)
code = link.recv(1)
sys.exit(code[0] if code else 99)
"""


class Shell:
    """Runs pieces of a page one after another in one folder.

    Args:
        folder: an empty folder; commands begin there, and a ``cd`` lasts.
    """

    def __init__(self, folder: Path, scratch: Path) -> None:
        self.folder, self._scratch, self._where = folder, scratch, folder
        address = str(scratch / "link")
        (scratch / "bin").mkdir()
        for name in ("shoal", "python", "torchrun"):
            program = scratch / "bin" / name
            program.write_text(SHIM.format(python=sys.executable, address=address, name=name))
            program.chmod(0o700)
        warm.can_fork(os.environ)  # The warm process dies with the thread that started it: not one of those below.
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._door.bind(address)
        self._door.listen()
        self._starting = threading.Lock()
        self._serving = threading.Thread(target=self._serve, daemon=True)
        self._serving.start()

    def run(self, commands: list[str], *, timeout: float) -> list[tuple[int, str]]:
        """Run each command in the same shell; what each printed on both streams, and its exit code."""
        script: list[str] = []
        for number, command in enumerate(commands):
            options = "set -e\n" if len(commands) == 1 else ""
            script.append(f"{{ {options}{command}\n}} > {self._scratch}/out.{number} 2>&1")
            script.append(f"echo $? > {self._scratch}/code.{number}")
        script.append(f"set +e; pwd > {self._scratch}/where")
        for path in self._scratch.glob("*.[0-9]*"):
            path.unlink()
        path = f"{self._scratch}/bin{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "HOME": str(self._scratch), "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
        shell = subprocess.Popen(
            ["bash", "-c", "\n".join(script)],
            cwd=self._where,
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            ended = shell.wait(timeout)
        except subprocess.TimeoutExpired:
            ended = -signal.SIGALRM
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
        if (self._scratch / "where").exists():
            self._where = Path((self._scratch / "where").read_text().strip())
        results = []
        for number, _ in enumerate(commands):
            out, code = self._scratch / f"out.{number}", self._scratch / f"code.{number}"
            if not out.exists():
                break
            results.append((int(code.read_text()) if code.exists() else ended, out.read_text(errors="replace")))
        return results

    def close(self) -> None:
        # A waiting accept() ends by this, and not by a close.
        with contextlib.suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)
        self._serving.join(10.0)
        self._door.close()

    def _serve(self) -> None:
        serving = []
        while True:
            try:
                link, _ = self._door.accept()
            except OSError:
                break
            serving.append(threading.Thread(target=self._follow, args=(link,), daemon=True))
            serving[-1].start()
        for thread in serving:
            thread.join(10.0)

    def _follow(self, link: socket.socket) -> None:
        """Start what a shim asks for; pass its signals on, kill when it is killed, and answer with the exit code."""
        with link:
            header, ancillary, _, _ = link.recvmsg(4, socket.CMSG_LEN(12))
            streams = array.array("i")
            streams.frombytes(ancillary[0][2])
            left, parts = int.from_bytes(header, "big"), []
            while left:
                parts.append(link.recv(left))
                left -= len(parts[-1])
            name, arguments, folder, environment = json.loads(b"".join(parts))
            with self._starting:
                process = self._start(name, arguments, folder, environment, list(streams))
            for stream in streams:
                os.close(stream)
            watcher = threading.Thread(target=self._pass_signals, args=(link, process), daemon=True)
            watcher.start()
            code = process.wait()
            with contextlib.suppress(OSError):
                link.sendall(bytes([code if code >= 0 else 128 - code]))
                link.shutdown(socket.SHUT_RDWR)
            watcher.join(10.0)

    @staticmethod
    def _start(name, arguments, folder, environment, streams) -> subprocess.Popen:
        stdin, stdout, stderr = streams
        options = {"cwd": folder, "env": environment, "stdin": stdin, "stdout": stdout, "stderr": stderr}
        module, rest = name, arguments
        if name == "torchrun":
            module = "torch.distributed.run"
        elif name == "python":
            module, rest = (arguments[1], arguments[2:]) if arguments[0] == "-m" else (arguments[0], arguments[1:])
        if warm.can_fork(environment):
            return warm.ForkedCommand(rest, module=module, **options)
        words = [module] if module.endswith(".py") else ["-m", module]
        return subprocess.Popen([*python_of_session(*words), *rest], **options)

    @staticmethod
    def _pass_signals(link: socket.socket, process: subprocess.Popen) -> None:
        while process.returncode is None:
            try:
                sent = link.recv(1)
            except OSError:
                return
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, sent[0] if sent else signal.SIGKILL)
            if not sent:
                return
