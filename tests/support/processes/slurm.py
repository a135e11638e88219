"""A real SLURM on this machine, for as long as a test: one controller and some nodes, each a daemon with a port of its own, or
each on a machine of its own where such are given (``machines.py``).
"""

import os
import pwd
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from support.processes.machines import Machines

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "sinfo")
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"


def missing_programs() -> list[str]:
    """What a cluster needs and is not here; root is needed too."""
    found = [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]
    return found if os.geteuid() == 0 else [*found, "root"]


@contextmanager
def slurm_cluster(
    folder: Path, *, num_nodes: int = 2, seconds: float = 30.0, machines: Machines | None = None
) -> Iterator[dict[str, str]]:
    """Start it in ``folder`` and yield the environment in which ``srun`` and ``sbatch`` find it.

    With machines, those whose names begin with ``n`` are the nodes, and the controller is on ``login``.
    """
    ports = _free_ports(num_nodes + 1)
    nodes = [f"n{number + 1:02d}" for number in range(num_nodes)]
    # munged runs as its own user and wants a folder that nobody else writes to, with a short path for its socket.
    munge = Path("/run/munge") / f"test-{os.getpid()}-{secrets.token_hex(4)}"
    munge.mkdir(parents=True, mode=0o755)
    user = pwd.getpwnam("munge")
    key = munge / "key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    for path in (munge.parent, munge, key):
        os.chown(path, user.pw_uid, user.pw_gid)
    conf = folder / "slurm.conf"
    addresses = machines.network.hosts if machines is not None else None
    conf.write_text(_configuration(folder, munge / "socket", nodes, ports, addresses))
    environment = {**os.environ, "SLURM_CONF": str(conf), "PATH": f"{_PATH}:{os.environ['PATH']}"}
    (folder / "state").mkdir()
    commands = [
        ["munged", "--foreground", f"--key-file={key}", f"--socket={munge}/socket"]
        + [f"--{name}-file={munge}/{name}" for name in ("pid", "log", "seed")],
        [*(machines.words("login") if machines else []), "slurmctld", "-D", "-c"],
        *([*(machines.words(node) if machines else []), "slurmd", "-D", "-N", node] for node in nodes),
    ]
    here = machines.words("login") if machines else []
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, munge, ignore_errors=True)
        for number, command in enumerate(commands):
            log = stack.enter_context((folder / f"daemon-{number}.log").open("w"))
            runs_as = "munge" if command[0] == "munged" else None
            started = subprocess.Popen(command, env=environment, stdout=log, stderr=log, user=runs_as, group=runs_as)
            stack.callback(_end, started)
            if command[0] == "munged":
                _wait_for((munge / "socket").exists, "munged's socket", seconds)
        _wait_for(lambda: _are_idle(here, environment, num_nodes), f"{num_nodes} idle nodes", seconds)
        yield environment


def _configuration(
    folder: Path, munge_socket: Path, nodes: list[str], ports: list[int], addresses: Mapping[str, str] | None
) -> str:
    host = socket.gethostname() if addresses is None else "login"
    controller = "127.0.0.1" if addresses is None else addresses["login"]
    lines = [
        "ClusterName=test",
        f"SlurmctldHost={host}({controller})",
        f"SlurmctldPort={ports[0]}",
        "SlurmUser=root",
        "AuthType=auth/munge",
        f"AuthInfo=socket={munge_socket}",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/spool-%n",
        f"SlurmdPidFile={folder}/slurmd-%n.pid",
        f"SlurmctldPidFile={folder}/slurmctld.pid",
        "ProctrackType=proctrack/pgid",
        "TaskPlugin=task/none",
        "MpiDefault=none",
        "JobAcctGatherType=jobacct_gather/none",
        "AccountingStorageType=accounting_storage/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU",
        "ReturnToService=2",
        "KillWait=5",
        "SlurmdParameters=config_overrides",
    ]
    for node, port in zip(nodes, ports[1:], strict=True):
        where = f"NodeHostname={host} NodeAddr=127.0.0.1" if addresses is None else f"NodeAddr={addresses[node]}"
        lines.append(f"NodeName={node} {where} Port={port} CPUs=4 RealMemory=500")
    lines.append("PartitionName=p Nodes=ALL Default=YES OverSubscribe=FORCE:4")
    return "\n".join(lines) + "\n"


def _are_idle(here: list[str], environment: dict[str, str], num_nodes: int) -> bool:
    asked = [*here, "sinfo", "--noheader", "--format=%D %t"]
    found = subprocess.run(asked, env=environment, capture_output=True, text=True, timeout=20)
    return found.stdout.split() == [str(num_nodes), "idle"]


def _wait_for(is_there, what: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not is_there():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:g} s for {what}")
        time.sleep(0.05)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
