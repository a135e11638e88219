"""What the network offers ranks, and whether anything of ours listens where it should not.

The backends are asked in a process of their own with a deadline: importing torch is slow, and a broken installation can hang or
crash. That process forms a real gloo group and reads which address gloo listens on, because what gloo picks follows from the
host's name, its resolver and its interfaces, and predicting it is guessing.
"""

import ipaddress
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable
from typing import Any

import psutil

from shoal.doctor.checks import Check, State, judge
from shoal.doctor.processes import OurProcess

PROBE_DEADLINE_SECONDS = 60.0
RESOLVE_DEADLINE_SECONDS = 3.0

_PROBE = """
import json, psutil, torch
import torch.distributed as dist
gloo = dist.is_available() and dist.is_gloo_available()
listening = []
if gloo:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(1))
    listening = [c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == "LISTEN"]
    dist.destroy_process_group()
cuda = torch.cuda.is_available()
print(json.dumps({
    "torch": torch.__version__, "gloo": gloo, "gloo_address": listening[0] if listening else None,
    "nccl": dist.is_available() and dist.is_nccl_available(), "cuda": cuda,
    "devices": torch.cuda.device_count() if cuda else 0,
}))
"""


def check_backends(*, seconds: float = PROBE_DEADLINE_SECONDS, probe: str = _PROBE) -> Check:
    """Import torch in a process of its own, form a gloo group of one, and say which backends there are."""
    # Ranks get the interface from their supervisor; here the question is what gloo takes when nobody tells it.
    environment = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    advice = "reinstall with `make install`, and run `python -c 'import torch'` to see more"
    try:
        done = subprocess.run(
            [sys.executable, "-c", probe], capture_output=True, text=True, timeout=seconds, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        wrong = f"torch did not import and form a gloo group within {seconds:g} s; {advice}"
        return judge("backends", "no answer", values={}, wrong=wrong)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return judge("backends", "torch failed", values={"exit_code": done.returncode}, wrong=f"{last}; {advice}")
    return describe_backends(json.loads(done.stdout.strip().splitlines()[-1]))


def describe_backends(values: dict[str, Any]) -> Check:
    """Judge what the probe reported."""
    words = [name if values[name] else f"no {name}" for name in ("gloo", "nccl", "cuda")]
    if values["cuda"]:
        words[-1] = f"cuda with {values['devices']} devices"
    found = ", ".join(words)
    if values["gloo"] and values["gloo_address"]:
        found += f"; gloo left alone listens on {values['gloo_address']}"
    wrong = note = None
    if not values["gloo"]:
        wrong = "this torch was built without gloo, which CPU processes need; install the one from PyPI"
    elif values["gloo_address"] and not is_loopback(values["gloo_address"]):
        note = (
            "runs of `shoal train` use the loopback interface; under torchrun on one machine, set GLOO_SOCKET_IFNAME=lo"
        )
    return judge("backends", found, values=values, wrong=wrong, note=note)


def skipped_backends() -> Check:
    """What stands in the place of the backends when the user asked not to wait for them."""
    return Check(name="backends", state=State.OK, found="not asked (--quick)")


def check_interface() -> Check:
    """The loopback interface, which ranks of one machine use, and the host's name, which gloo resolves when nobody tells it."""
    addresses = {name: [entry.address for entry in entries] for name, entries in psutil.net_if_addrs().items()}
    stats = psutil.net_if_stats()
    loopback = [
        name
        for name, found in addresses.items()
        if name in stats and stats[name].isup and any(is_loopback(address) for address in found)
    ]
    host = socket.gethostname()
    resolved = resolve(host)
    values = {"loopback": loopback, "hostname": host, "resolved": resolved}
    wrong = note = None
    if not loopback:
        wrong = "no interface has a loopback address, which ranks of one machine talk over; run `ip link set lo up`"
    elif not resolved:
        note = f"the host's name {host!r} does not resolve, which torchrun and runs on many machines need; add it to /etc/hosts"
    shown = ", ".join(resolved) if resolved else "nothing"
    return judge(
        "interface", f"{', '.join(loopback) or 'no loopback'}; {host} is {shown}", values=values, wrong=wrong, note=note
    )


def check_ports(ours: Iterable[OurProcess]) -> Check:
    """Whether loopback can be bound, and whether a process of ours listens on any other address."""
    wrong = None
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            found = f"127.0.0.1 can be bound (got {server.getsockname()[1]})"
    except OSError as error:
        found = "127.0.0.1 cannot be bound"
        wrong = f"{error}; ranks of one machine meet there, so nothing can start"
    exposed = exposed_sockets(ours)
    if exposed:
        found += f"; {len(exposed)} of ours listen beyond loopback"
        shown = ", ".join(f"{entry['address']}:{entry['port']} of process {entry['pid']}" for entry in exposed)
        wrong = (
            wrong
            or f"anyone who reaches this machine can reach {shown}; stop that run, and start it with `shoal train`"
        )
    return judge("ports", found, values={"exposed": exposed}, wrong=wrong)


def exposed_sockets(ours: Iterable[OurProcess]) -> list[dict[str, Any]]:
    """The listening sockets of these processes and of their supervisors that others than this machine can reach."""
    found = []
    for pid in sorted({pid for process in ours for pid in (process.pid, process.supervisor_pid)}):
        try:
            connections = psutil.Process(pid).net_connections("inet")
        except psutil.Error:
            continue
        for connection in connections:
            if connection.status == psutil.CONN_LISTEN and not is_loopback(connection.laddr.ip):
                found.append({"pid": pid, "address": connection.laddr.ip, "port": connection.laddr.port})
    return found


def is_loopback(address: str) -> bool:
    """True for 127.0.0.0/8 and ::1, also written as an IPv4 address inside IPv6."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(parsed, "ipv4_mapped", None)
    return bool(mapped.is_loopback if mapped is not None else parsed.is_loopback)


def resolve(host: str, *, seconds: float = RESOLVE_DEADLINE_SECONDS) -> list[str]:
    """The addresses of a host's name; empty when it has none or the resolver is silent for that long."""
    found: list[str] = []

    def ask() -> None:
        try:
            found.extend(
                dict.fromkeys(str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
            )
        except OSError:
            return

    # The resolver takes no deadline of its own, so it waits in a thread that may be left behind.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return list(found)
