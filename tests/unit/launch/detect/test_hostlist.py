"""SLURM's host lists: what they mean, what is refused, and that SLURM itself reads them so."""

import random
import shutil
import subprocess

import pytest

from shoal.core.errors import RequestError
from shoal.launch.detect.hostlist import expand_counts, expand_hosts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("login", ["login"]),
        ("n[01-03,7]", ["n01", "n02", "n03", "n7"]),
        ("rack[0-1]n[01-02]", ["rack0n01", "rack0n02", "rack1n01", "rack1n02"]),
        ("a[1-2]b[1-2]c[1-2]", ["a1b1c1", "a1b1c2", "a2b1c1", "a2b1c2", "a1b2c1", "a1b2c2", "a2b2c1", "a2b2c2"]),
        ("a,b[8-10],c", ["a", "b8", "b9", "b10", "c"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
    ],
)
def test_hosts(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(
    "text",
    ["", "a,", "n[1-2", "n1-2]", "n[2-1]", "n[a]", "n[]", "n[[1]]", "n[1]-ib", "n[0-99999]", "x y", "n[0-9999]m[0-99]"],
)
def test_what_is_no_host_list_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="host list"):
        expand_hosts(text)


def test_counts_per_host() -> None:
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    for text in ("", "2(x", "x2", "2(x99999999)"):
        with pytest.raises(RequestError, match="processes per host"):
            expand_counts(text)


def _random_list(draw: random.Random) -> str:
    def numbers() -> str:
        width, first = draw.choice([0, 0, 1, 2, 3, 4]), draw.randrange(120)
        last = first + draw.randrange(12)
        return f"{first:0{width}d}" + ("" if draw.random() < 0.4 else f"-{last:0{width}d}")

    def word() -> str:
        name, brackets = draw.choice(["n", "rack", "gpu-", "a1b", "x_", "c.d"]), draw.choice([0, 1, 1, 1, 2, 3])
        for number in range(brackets):
            name += "[" + ",".join(numbers() for _ in range(draw.choice([1, 1, 2, 3]))) + "]"
            name += draw.choice(["n", "-ib", ""]) if number < brackets - 1 else draw.choice(["", "", "", "", "", "z"])
        return name

    return ",".join(word() for _ in range(draw.choice([1, 1, 2, 3])))


@pytest.mark.parametrize("count", [50, pytest.param(10_000, marks=[pytest.mark.soak, pytest.mark.timeout(900)])])
def test_slurm_reads_random_lists_the_same_way(count: int, tmp_path) -> None:
    """Names that it refuses are refused here too."""
    if shutil.which("scontrol") is None:
        pytest.skip("scontrol is not there; apt-get install slurm-client")
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=x\nSlurmctldHost=localhost\nNodeName=localhost\nPartitionName=p Nodes=ALL\n")
    draw = random.Random(count)
    for _ in range(count):
        text = _random_list(draw)
        asked = ["scontrol", "show", "hostnames", text]
        theirs = subprocess.run(
            asked, capture_output=True, text=True, env={"SLURM_CONF": str(conf), "PATH": "/usr/bin"}
        )
        try:
            ours = expand_hosts(text)
        except RequestError:
            ours = []
        assert ours == theirs.stdout.split(), text
