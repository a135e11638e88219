"""``shoal data split`` and ``stats``: what they print and write, and what they refuse."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from shoal.cli.data.group import app
from shoal.core.errors import RequestError
from support.processes.command import ROOT

PUMPS = ROOT / "recipes" / "data" / "pumps.csv"


def run(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if isinstance(result.exception, RequestError):
        return 2, str(result.exception)
    return result.exit_code, result.stdout


def test_a_split_is_printed_proven_and_written(tmp_path):
    code, out = run("split", PUMPS, "--by", "user", "--key", "user", "--out", tmp_path, "--json", tmp_path / "r.json")
    assert code == 0 and "proven: every row once, no key twice" in out and "the largest key has" in out
    rows = [np.load(tmp_path / f"{name}.npy") for name in ("train", "validation", "test")]
    assert sorted(np.concatenate(rows).tolist()) == list(range(360))
    users = [line.split(",")[1] for line in PUMPS.read_text().splitlines()[1:]]
    sides = [{users[row] for row in side} for side in rows]
    assert not (sides[0] & sides[1] or sides[0] & sides[2] or sides[1] & sides[2])
    assert json.loads((tmp_path / "r.json").read_text())["total"] == 360


def test_stats_are_those_of_the_columns(tmp_path):
    code, out = run("stats", PUMPS, "--json", tmp_path / "r.json")
    assert code == 0 and "360 rows in 1 csv file(s)" in out
    said = {one["name"]: one for one in json.loads((tmp_path / "r.json").read_text())["columns"]}
    there = [float(line.split(",")[3]) for line in PUMPS.read_text().splitlines()[1:] if line.split(",")[3]]
    assert said["temperature"]["missing"] == 360 - len(there)
    assert said["temperature"]["mean"] == pytest.approx(np.mean(there)) and said["temperature"]["most"] == max(there)
    assert said["when"]["least"].startswith("2026-01-05T06:00")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--by", "usr"], "there is no 'usr'; did you mean 'user'"),
        (["--by", "user"], "needs key"),
        (["--by", "user", "--key", "usr"], "no column 'usr' to cut by; did you mean 'user'"),
        (["--validation", "0.6", "--test", "0.5"], "leave nothing for training"),
        (["--by", "time", "--key", "flow"], "has no 'flow', the time that rows are cut by"),
    ],
)
def test_wrong_requests(arguments, said):
    code, message = run("split", PUMPS, *arguments)
    assert code == 2 and said in message
