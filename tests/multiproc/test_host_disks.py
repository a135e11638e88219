"""The command on two hosts, each with an address, a name, a process table, a /dev/shm and a disk of its own: what is saved is
found again, and the end is that of a run on one host."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.checkpoint.whole import verify
from support.processes.command import ROOT
from support.processes.network_namespaces import Network, built_network

ADDRESSES = {"a": "10.84.7.1", "b": "10.84.7.2"}
BOOT = 'mount --bind "$0" "$1" && mount -t tmpfs tmpfs /dev/shm && hostname "$2" && ip link set lo up && shift 2 && exec "$@"'

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with built_network(ADDRESSES) as made:
        yield made


class Hosts:
    """Two hosts whose disks are at one path; ``train`` is a rank on each."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network, self.folder, self.mount = network, folder, folder / "disk"
        self.mount.mkdir()
        for name in ADDRESSES:
            (folder / name).mkdir()

    def enter(self, name: str) -> list[str]:
        """What stands before a command that runs on a host."""
        apart = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        boot = ["sh", "-c", BOOT, str(self.folder / name), str(self.mount), f"host-{name}"]
        return [*self.network.enter(name), *apart, *boot]

    def quoted(self, name: str) -> str:
        """The same as text for a shell."""
        return shlex.join(self.enter(name))

    def start(self, name: str, words: list[str], **environment: str) -> subprocess.Popen:
        given = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path), **environment}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen([*self.enter(name), *words], env=given, **streams)

    def train(self, *words: str, hosts: str = "ab") -> list[tuple[int, str]]:
        """Exit code and output of every rank."""
        ranks = []
        place = {"WORLD_SIZE": str(len(hosts)), "MASTER_ADDR": ADDRESSES[hosts[0]], "MASTER_PORT": "29500"}
        try:
            for rank, name in enumerate(hosts):
                own = {"RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} if len(hosts) > 1 else {}
                command = [sys.executable, "-m", "shoal", "train", str(ROOT / "recipes/tiny.toml"), *words]
                ranks.append(self.start(name, command, **(own | place if own else {})))
            outputs = [rank.communicate(timeout=200)[0] for rank in ranks]
        finally:
            for rank in ranks:
                if rank.poll() is None:
                    rank.kill()
                    rank.wait()
        return [(rank.returncode, output) for rank, output in zip(ranks, outputs, strict=True)]

    def over_hosts(self, name: str, *words: str) -> tuple[int, str]:
        """``--hosts`` from the first host, by a stand-in for ssh that enters the other one."""
        (self.folder / "shell").write_text(
            '#!/bin/sh\nhost=$1; shift\ncase $host in\n'
            f'{ADDRESSES["a"]}) exec sh -c "$*" ;;\n'
            f'*) exec {self.quoted("b")} sh -c "$*" ;;\nesac\n'
        )  # fmt: skip
        (self.folder / "shell").chmod(0o755)
        where = ["--hosts", f"{ADDRESSES['a']}:1,{ADDRESSES['b']}:1", "--ssh", str(self.folder / "shell")]
        command = [sys.executable, "-m", "shoal", "train", str(ROOT / "recipes/tiny.toml"), *where, *words]
        started = self.start("a", [*command, "--run-dir", str(self.mount / name)])
        try:
            said = started.communicate(timeout=200)[0]
        finally:
            started.kill()
            started.wait()
        return started.returncode, said

    def run(self, name: str, place: str, steps: int, *words: str, plan: str = "dp=2", hosts: str = "ab") -> str:
        """A run that has to succeed; its last hash."""
        sets = [f"train.steps={steps}", "train.threads=1", "checkpoint.every=2", f"checkpoint.place={place}"]
        given = [word for one in sets for word in ("--set", one)]
        ended = self.train("--plan", plan, "--run-dir", str(self.mount / name), *given, *words, hosts=hosts)
        assert all(code == 0 for code, _ in ended), ended
        summary = json.loads((self.folder / hosts[0] / name / "summary.json").read_text())
        assert summary["status"] == "completed" and summary["steps"] == steps
        assert summary["checkpoint_error"] is None
        return str(summary["weights_sha256"])


@pytest.fixture
def hosts(network: Network, tmp_path: Path) -> Hosts:
    return Hosts(network, tmp_path)


@pytest.mark.parametrize("plan", ["dp=2", "dp=2 zero=3"])
@pytest.mark.parametrize("place", ["auto", "hosts", "address"])
def test_two_hosts_without_a_common_folder_go_on_to_the_bits_of_one_run(hosts: Hosts, place: str, plan: str) -> None:
    bucket = hosts.folder / "bucket"
    bucket.mkdir()
    where = f"file://{bucket}/run" if place == "address" else place
    hosts.run("run", where, 4, plan=plan)
    resumed = hosts.run("run", where, 8, "--resume", plan=plan)
    assert resumed == hosts.run("alone", "first", 8, plan=plan)
    checkpoints = [hosts.folder / name / "run" / "checkpoints" for name in ADDRESSES]
    newest = [folder / "step-00000008" for folder in checkpoints]
    if place == "auto":
        assert verify(newest[0]) == [] and not newest[1].exists()
    elif place == "hosts":
        assert "rank-001.safetensors is missing here: host host-b has it" in verify(newest[0])[0]
        assert "rank-000.safetensors is missing here: host host-a has it" in verify(newest[1])[0]
    assert [path.name for folder in checkpoints if folder.exists() for path in folder.glob(".*")] == []


def test_what_two_hosts_saved_goes_on_on_one_and_on_the_other_first(hosts: Hosts) -> None:
    """Under another number of ranks, and with rank 0 on the host that has nothing."""
    two = {"plan": "dp=2 zero=3"}
    whole = hosts.run("whole", "first", 8, **two)
    hosts.run("first", "first", 4, **two)
    shutil.copytree(hosts.folder / "a" / "first", hosts.folder / "a" / "alone")
    assert hosts.run("alone", "first", 8, "--resume", plan="dp=1", hosts="a") != ""
    shutil.copytree(hosts.folder / "a" / "first", hosts.folder / "a" / "turned")
    shutil.copytree(hosts.folder / "b" / "first", hosts.folder / "b" / "turned")
    assert hosts.run("turned", "first", 8, "--resume", hosts="ba", **two) == whole
    # Each its part: one host alone says what it lacks, and goes on once it is copied there.
    hosts.run("parts", "hosts", 4, **two)
    shutil.rmtree(hosts.folder / "a" / "parts" / "checkpoints" / "step-00000002")
    ended = hosts.train("--plan", "dp=1", "--run-dir", str(hosts.mount / "parts"), "--resume", hosts="a")
    assert "rank-001.safetensors is missing here: host host-b has it" in ended[0][1], ended


def test_a_folder_that_has_to_be_shared_and_is_not_is_refused_before_the_first_step(hosts: Hosts) -> None:
    for where, said in (
        ("shared", "2 folders that do not share their files (rank 0 on host-a; rank 1 on host-b)"),
        (f"file://{hosts.mount}/bucket", "what rank 1 (host-b) wrote there: it is another place on each host"),
    ):
        run_dir = hosts.mount / where.partition(":")[0]
        ended = hosts.train("--plan", "dp=2", "--run-dir", str(run_dir), "--set", f"checkpoint.place={where}")
        assert all(code for code, _ in ended), ended
        assert said in ended[0][1], ended[0][1]
        assert not (hosts.folder / "a" / run_dir.name / "checkpoints").exists()


def test_hosts_without_a_common_folder_over_a_remote_shell(hosts: Hosts) -> None:
    """Rank 0 is where the command is; the other host makes a run directory of its own, and nothing of it has to be copied."""
    words = ["--plan", "dp=2 zero=3", "--set", "train.threads=1", "--set", "checkpoint.every=2"]
    code, said = hosts.over_hosts("run", *words, "--set", "train.steps=4")
    assert code == 0 and "have no run directory in common" in said, said
    assert verify(hosts.folder / "a/run/checkpoints/step-00000004") == []
    assert (hosts.folder / "b/run/events/rank-001.jsonl").exists()
    assert not (hosts.folder / "b/run/checkpoints/step-00000004").exists()
    code, said = hosts.over_hosts("run", *words, "--resume", "--set", "train.steps=8")
    assert code == 0, said
    summary = json.loads((hosts.folder / "a/run/summary.json").read_text())
    assert summary["weights_sha256"] == hosts.run("alone", "first", 8, plan="dp=2 zero=3")


def test_what_has_to_be_shared_and_is_not_is_refused_over_a_remote_shell(hosts: Hosts) -> None:
    shared = ["--plan", "ps=1 workers=1"]
    code, said = hosts.over_hosts("servers", *shared)
    assert code == 2 and "does not share" in said and "every server writes its part" in said, said
    broken = ["--plan", "dp=2", "--set", "checkpoint.place=shared"]
    code, said = hosts.over_hosts("broken", *broken)
    assert code in (1, 2) and "2 folders that do not share their files" in said, said
