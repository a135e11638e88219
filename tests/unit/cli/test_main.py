"""What the whole command promises: exit codes, one message, the traceback on request only."""

import json
import os
import re
import signal
import subprocess
import sys
from importlib.metadata import version

import pytest

from shoal.cli.main import lift_debug, wants_json_alone

VERBS = (
    "train",
    "run",
    "place",
    "verify",
    "eval",
    "sample",
    "schedule",
    "plan",
    "predict",
    "simulate",
    "calibrate",
    "tune",
    "init",
    "ckpt",
    "keys",
    "job",
    "role",
    "doctor",
    "serve",
    "data",
    "top",
    "report",
    "runs",
    "export",
    "dash",
)

RUNS = ("runs list", "runs compare", "runs prune")
GROUPS = ("ckpt", "keys", "role", "job", "data", "runs")

# The real main() with one more verb, which does what its argument says.
WITH_A_VERB = """
import sys
from shoal.cli.main import app, main
from shoal.core.errors import RequestError, RunError

@app.command("misbehave")
def misbehave(how: str) -> None:
    if how == "request":
        raise RequestError("batch 3 is not 2 x 2; set train.global_batch=4")
    if how == "run":
        raise RunError("rank 1 died")
    if how == "bug":
        raise ValueError("a bug")
    if how.startswith("/"):
        raise PermissionError(13, "Permission denied", how)
    if how == "wait":
        print("up", flush=True)
        sys.stdin.read()

main()
"""


def misbehave(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", WITH_A_VERB, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def test_help_lists_every_verb(installed_shoal):
    done = installed_shoal("--help")
    assert done.returncode == 0 and done.stderr == ""
    commands = done.stdout.partition("Commands:")[2]
    names = [line.split()[0] for line in commands.splitlines() if re.match(r"  \w", line)]
    assert sorted(names) == sorted(VERBS)


@pytest.mark.parametrize(
    "verb",
    [verb for verb in (*VERBS, "keys new", "keys show", "job slurm", "data show", *RUNS) if verb not in GROUPS],
)
def test_every_verb_takes_json(installed_shoal, verb):
    done = installed_shoal(*verb.split(), "--help")
    assert done.returncode == 0 and "--json FILE" in done.stdout


def test_version(installed_shoal):
    assert installed_shoal("--version").stdout == f"shoal {version('shoal')}\n"


def test_a_misspelt_verb_gets_the_nearest_name(installed_shoal):
    done = installed_shoal("trian")
    assert done.returncode == 2
    assert "Did you mean 'train'?" in done.stderr and done.stdout == ""


def test_a_misspelt_option_gets_the_nearest_name(installed_shoal):
    done = installed_shoal("doctor", "--qick")
    assert done.returncode == 2 and "--quick" in done.stderr


@pytest.mark.parametrize(
    ("how", "code", "message"),
    [("request", 2, "batch 3 is not 2 x 2; set train.global_batch=4"), ("run", 1, "rank 1 died")],
)
def test_our_errors_are_one_message_and_their_code(how, code, message):
    done = misbehave("misbehave", how)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", f"error: {message}\n")


def test_no_permission_is_told_as_a_run_directorys_only_where_it_is_one(tmp_path):
    run, data = tmp_path / "run", tmp_path / "data"
    for folder in (run / "events", data):
        folder.mkdir(parents=True)
    (run / "recipe.toml").touch()
    for path in (run / "events" / "rank-000.jsonl", run, tmp_path / "closed" / "checkpoints"):
        done = misbehave("misbehave", str(path))
        assert done.returncode == 2 and f"no permission for {path}; a run directory is" in done.stderr
    done = misbehave("misbehave", str(data / "train.csv"))
    assert done.returncode == 1 and "run directory" not in done.stderr and str(data / "train.csv") in done.stderr


def test_any_other_error_is_short_and_points_to_debug():
    done = misbehave("misbehave", "bug")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ValueError: a bug\n") and "--debug" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments", [["--debug", "misbehave", "bug"], ["misbehave", "bug", "--debug"], ["misbehave", "--debug", "request"]]
)
def test_the_traceback_comes_with_debug_wherever_it_stands(arguments):
    done = misbehave(*arguments)
    assert "Traceback (most recent call last)" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")


def test_ctrl_c_is_130():
    process = subprocess.Popen(
        [sys.executable, "-c", WITH_A_VERB, "misbehave", "wait"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"up\n"
    os.kill(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130 and b"Traceback" not in stderr


def test_a_missing_argument_is_a_usage_error():
    done = misbehave("misbehave")
    assert done.returncode == 2 and "Missing argument 'how'" in done.stderr


@pytest.mark.parametrize(
    ("given", "lifted", "debug"),
    [
        (["train", "a.toml"], ["train", "a.toml"], False),
        (["train", "--debug", "a.toml"], ["--debug", "train", "a.toml"], True),
        (["--debug", "train", "--debug"], ["--debug", "train"], True),
        (["sample", "run", "--", "--debug"], ["sample", "run", "--", "--debug"], False),
        ([], [], False),
    ],
)
def test_debug_is_lifted_to_the_front(given, lifted, debug):
    assert lift_debug(given) == (lifted, debug)


@pytest.mark.parametrize("form", [("--json", "-"), ("--json=-",)], ids=" ".join)
def test_json_on_stdout_sends_what_people_read_to_stderr(installed_shoal, tmp_path, form):
    done = installed_shoal("init", "new", *form)
    assert done.returncode == 0 and json.loads(done.stdout)["folder"] == "new"
    plain = installed_shoal("init", "other")
    assert plain.stderr == "" and done.stderr == plain.stdout.replace("other", "new")


def test_a_dash_after_two_dashes_is_no_json():
    assert wants_json_alone(["init", "--json", "-"]) and not wants_json_alone(["init", "--", "--json", "-"])
    assert not wants_json_alone(["init", "--json", "file", "-"])
