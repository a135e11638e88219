"""Runs on hosts that are namespaces of this machine (own address, host name, processes, shared memory), over a real sshd."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from support.processes.command import wait_until
from support.processes.network_namespaces import Network, built_network, ip

pytestmark = pytest.mark.soak
ROOT = Path(__file__).parents[2]
HOSTS = {"a": "10.83.0.1", "b": "10.83.0.2", "c": "10.83.0.3"}
CONFIG = """
Port 22
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
StrictModes no
PidFile none
ClientAliveInterval 1
ClientAliveCountMax 3
"""
BOOT = """hostname {host}; mount -t tmpfs tmpfs /dev/shm; mount -t tmpfs tmpfs /run; mkdir /run/sshd
exec {sshd} -D -f {folder}/config"""
STRANGER = """
import socket, sys
for port in map(int, sys.argv[2:]):
    line = socket.socket(); line.settimeout(1.0)
    try:
        line.connect((sys.argv[1], port)); line.sendall(b"x" * 100); print(port, "took", line.recv(10))
    except OSError as error:
        print(port, "refused", error)
"""


@dataclass
class Cluster:
    folder: Path
    network: Network

    def start(self, run: str, *more: str) -> "subprocess.Popen[str]":
        shell = f"ssh -T -i {self.folder}/user -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
        hosts = f"{HOSTS['a']}:1,{HOSTS['b']}:1"
        words = [
            *self.network.enter("c"), sys.executable, "-m", "shoal", "train", str(ROOT / "recipes/tiny.toml"),
            "--plan", "dp=2", "--hosts", hosts, "--ssh", shell, "--run-dir", str(self.folder / run),
            "--set", "train.threads=1", *more,
        ]  # fmt: skip
        path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        return subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "PYTHONPATH": path}
        )

    def start_long(self, run: str, *more: str) -> "subprocess.Popen[str]":
        process = self.start(run, "--set", "train.steps=40000", *more)
        events = self.folder / run / "events" / "rank-000.jsonl"
        wait_until(lambda: events.exists() and '"step"' in events.read_text(), "a step", seconds=90)
        return process

    def ranks(self, run: str) -> dict[int, psutil.Process]:
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                variables = process.environ()
                if variables.get("SHOAL_RUN_DIR") == str(self.folder / run) and "SHOAL_BOARD_FD" in variables:
                    found[int(variables["RANK"])] = process
        return found

    def end(self, process: "subprocess.Popen[str]", run: str) -> tuple[int, str]:
        text, _ = process.communicate(timeout=60)
        wait_until(lambda: not self.ranks(run), "the ends of all ranks", seconds=20)
        wait_until(lambda: not agents(), "the ends of all agents and their shells", seconds=20)
        return process.returncode, text


def agents() -> list[str]:
    """Agents, and what sshd has started for them."""
    lines = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            lines.append(" ".join(process.cmdline()))
    return [line for line in lines if "shoal.launch.hosts.agent" in line or line.startswith("sshd: root")]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    sshd = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:" + os.environ["PATH"])
    if sshd is None or shutil.which("ssh") is None:
        pytest.skip("needs ssh and sshd; apt-get install openssh-server")
    folder = tmp_path_factory.mktemp("cluster")
    with built_network(HOSTS) as network, contextlib.ExitStack() as stack:
        for name in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
        (folder / "config").write_text(CONFIG.format(folder=folder))
        for host in ("a", "b"):
            boot = BOOT.format(host=host, sshd=sshd, folder=folder)
            apart = ["unshare", "-m", "-u", "-i", "-p", "-f", "--kill-child", "--mount-proc", "sh", "-c", boot]
            daemon = subprocess.Popen([*network.enter(host), *apart])
            stack.callback(daemon.wait)
            stack.callback(daemon.kill)
        for host in ("a", "b"):
            words = [*network.enter("c"), "bash", "-c", f"exec 3<>/dev/tcp/{HOSTS[host]}/22"]
            ready = lambda: subprocess.run(words, capture_output=True, check=False).returncode == 0  # noqa: B023, E731
            wait_until(ready, f"sshd on {host}")
        yield Cluster(folder, network)


def test_two_hosts_end_in_the_bits_of_one(cluster: Cluster) -> None:
    code, text = cluster.end(cluster.start("bits"), "bits")
    assert code == 0, text
    summary = json.loads((cluster.folder / "bits" / "summary.json").read_text())
    assert summary["weights_sha256"].startswith("d46569df"), text


def test_a_killed_rank_is_named_with_its_host(cluster: Cluster) -> None:
    process = cluster.start_long("killed")
    started = time.monotonic()
    cluster.ranks("killed")[1].send_signal(signal.SIGKILL)
    code, text = cluster.end(process, "killed")
    assert code == 1 and time.monotonic() - started < 10
    assert f"rank 1 on host {HOSTS['b']} failed at step" in text and "SIGKILL" in text


def test_a_pulled_cable_is_named_within_the_lease(cluster: Cluster) -> None:
    process = cluster.start_long("cable", "--set", "elastic.lease_seconds=4")
    started = cluster.network.set_link("b", "down")
    try:
        code, text = cluster.end(process, "cable")
    finally:
        cluster.network.set_link("b", "up")
    assert code == 1 and time.monotonic() - started < 12
    assert f"rank 1 on host {HOSTS['b']}" in text and "no sign of life for 4" in text


def test_hosts_that_drop_what_comes_from_each_other_are_named_before_the_first_step(cluster: Cluster) -> None:
    """As behind a firewall: the command reaches both."""
    at = {"a": HOSTS["b"], "b": HOSTS["a"]}
    for host, other in at.items():
        ip("-n", cluster.network.spaces[host], "neigh", "replace", other, "lladdr", "02:00:00:00:00:01", "dev", "eth")
    started = time.monotonic()
    try:
        code, text = cluster.end(cluster.start("dropped"), "dropped")
    finally:
        for host, other in at.items():
            ip("-n", cluster.network.spaces[host], "neigh", "del", other, "dev", "eth")
    assert code == 1 and time.monotonic() - started < 50
    assert f"host a ({HOSTS['a']}) does not reach b ({HOSTS['b']}): no answer within 10 s" in text


@pytest.mark.parametrize(("host", "plan"), [("b", "dp=2"), ("a", "dp=2"), ("b", "dp=2 zero=2")])
def test_without_its_cable_a_host_is_done_without_and_every_bit_stays(cluster: Cluster, host: str, plan: str) -> None:
    run = f"shrunk-{host}-{plan.replace(' ', '-')}"
    shrink = ("elastic.mode=shrink", "elastic.lease_seconds=4", "checkpoint.every=0", "train.steps=400")
    words = [word for setting in shrink for word in ("--set", setting)]
    process = cluster.start_long(run, "--plan", plan, *words)
    started = cluster.network.set_link(host, "down")
    try:
        views = cluster.folder / run / "events" / "supervisor.jsonl"
        wait_until(lambda: '"epoch":2' in views.read_text().replace(" ", ""), "the view without it", seconds=20)
        assert time.monotonic() - started < 9
        wait_until(lambda: len(cluster.ranks(run)) == 1, "the end of the rank that was cut off", seconds=5)
        code, text = cluster.end(process, run)
    finally:
        cluster.network.set_link(host, "up")
    assert code == 0 and f"lost host {HOSTS[host]}" in text, text
    summary = json.loads((cluster.folder / run / "summary.json").read_text())
    calm = cluster.start(f"{run}-calm", "--plan", plan, "--set", "train.steps=400", "--set", "checkpoint.every=0")
    cluster.end(calm, f"{run}-calm")
    undisturbed = json.loads((cluster.folder / f"{run}-calm" / "summary.json").read_text())
    assert summary["elastic"]["views"] == 2 and summary["elastic"]["paused_seconds"] < 6, text
    assert (summary["steps"], summary["weights_sha256"]) == (400, undisturbed["weights_sha256"]), text


def test_nothing_is_left_when_the_coordinator_is_killed(cluster: Cluster) -> None:
    process = cluster.start_long("alone")
    process.kill()
    cluster.end(process, "alone")


def test_ctrl_c_saves_on_all_hosts(cluster: Cluster) -> None:
    process = cluster.start_long("stopped")
    process.send_signal(signal.SIGINT)
    code, text = cluster.end(process, "stopped")
    assert code == 130, text
    assert json.loads((cluster.folder / "stopped" / "summary.json").read_text())["status"] == "interrupted"


def test_a_stranger_gets_no_byte_and_changes_nothing(cluster: Cluster) -> None:
    """From a third host: no port of a running rank, agent or coordinator can be connected to."""
    process = cluster.start_long("strange")
    try:
        tables = Path(f"/proc/{cluster.ranks('strange')[0].pid}/net/tcp").read_text().splitlines()[1:]
        listening = {int(line.split()[1].partition(":")[2], 16) for line in tables if line.split()[3] == "0A"} - {22}
        assert listening, "gloo listens on nothing?"
        ports = map(str, sorted(listening))
        tried = subprocess.run(
            [*cluster.network.enter("c"), sys.executable, "-c", STRANGER, HOSTS["a"], *ports],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        assert "took" not in tried.stdout and tried.stdout.count("refused") == len(listening), tried.stdout
        assert process.poll() is None and len(cluster.ranks("strange")) == 2
    finally:
        process.send_signal(signal.SIGTERM)
        code, text = cluster.end(process, "strange")
    assert code == 143, text
