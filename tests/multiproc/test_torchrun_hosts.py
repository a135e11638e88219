"""``shoal train`` under torchrun on two hosts that are namespaces: a killed rank, a pulled cable, another recipe on one host."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from support.processes.command import ROOT, wait_until
from support.processes.network_namespaces import Network, built_network

pytestmark = [pytest.mark.soak, pytest.mark.timeout(400)]
ADDRESSES = {"a": "10.85.3.1", "b": "10.85.3.2"}


class Torchrun:
    """An agent of torchrun on each host, with a rank each."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network, self.folder = network, folder
        self.agents: dict[str, subprocess.Popen[str]] = {}

    def start(self, host: str, *words: str, restarts: int = 0) -> None:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
        torchrun += ["--node-rank", str(list(ADDRESSES).index(host)), "--max-restarts", str(restarts)]
        torchrun += ["--rdzv-backend", "c10d", "--rdzv-id", "x", "--rdzv-endpoint", f"{ADDRESSES['a']}:29400"]
        # Their names lead elsewhere in a namespace.
        torchrun += ["--rdzv-conf", f"is_host={int(host == 'a')}"]
        torchrun += [
            "--local-addr",
            ADDRESSES[host],
            "-m",
            "shoal",
            "train",
            str(ROOT / "recipes/tiny.toml"),
            "--plan",
            "dp=2",
        ]
        torchrun += ["--run-dir", str(self.folder / "run"), "--set", "train.threads=1", *words]
        apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        given = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
        self.agents[host] = subprocess.Popen(
            [*self.network.enter(host), *apart, *torchrun],
            env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def await_steps(self, count: int) -> None:
        events = self.folder / "run" / "events" / "rank-000.jsonl"
        has_begun = lambda: events.exists() and events.read_text().count('"kind": "step"') >= count  # noqa: E731
        wait_until(has_begun, f"{count} steps", seconds=120)

    def rank(self, number: int) -> psutil.Process:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                is_ours = str(self.folder / "run") in words and not {"torch.distributed.run", "unshare"} & set(words)
                if is_ours and process.environ().get("RANK") == str(number):
                    return process
        raise AssertionError(f"no rank {number}")

    def end(self, seconds: float = 120) -> tuple[list[int], str]:
        said = [agent.communicate(timeout=seconds)[0] for agent in self.agents.values()]
        return [agent.returncode for agent in self.agents.values()], "\n".join(said)


def _has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def torchrun(tmp_path: Path) -> Iterator[Torchrun]:
    with built_network(ADDRESSES) as network:
        made = Torchrun(network, tmp_path)
        yield made
        for agent in made.agents.values():
            if agent.poll() is None:
                agent.kill()
                agent.wait()
            agent.stdout.close()


def test_torchrun_starts_all_ranks_again_and_the_run_goes_on_from_its_checkpoint(torchrun: Torchrun) -> None:
    """Its count of restarts is each agent's own, and its store keeps what the ranks before have said."""
    for host in ADDRESSES:
        torchrun.start(host, "--set", "train.steps=200", "--set", "checkpoint.every=20", restarts=2)
    torchrun.await_steps(25)
    torchrun.rank(1).send_signal(signal.SIGKILL)
    codes, said = torchrun.end(240)
    assert codes == [0, 0], said
    summary = json.loads((torchrun.folder / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", 200)


def test_a_pulled_cable_under_torchrun_is_named_within_the_lease(torchrun: Torchrun) -> None:
    for host in ADDRESSES:
        torchrun.start(host, "--set", "train.steps=100000", "--set", "elastic.lease_seconds=4")
    torchrun.await_steps(5)
    ranks = [torchrun.rank(number) for number in (0, 1)]
    started = torchrun.network.set_link("b", "down")
    # torchrun's agent on the host that was cut off may not come to reap its rank.
    wait_until(lambda: all(_has_ended(rank) for rank in ranks), "the ends of both ranks", seconds=30)
    assert time.monotonic() - started < 15
    torchrun.network.set_link("b", "up")
    _, said = torchrun.end()
    assert "no sign of life for 4" in said or "has not answered for 4" in said, said
    assert "rank 1 on host" in said, said


def test_another_recipe_on_one_host_is_refused_before_the_first_step(torchrun: Torchrun) -> None:
    torchrun.start("a", "--set", "train.steps=4")
    torchrun.start("b", "--set", "train.steps=5")
    codes, said = torchrun.end()
    assert all(codes) and said.count("give every host the same recipe file and the same --set") == 1, said
    assert "rank 1 on host" in said and not (torchrun.folder / "run" / "events" / "rank-000.jsonl").exists()
