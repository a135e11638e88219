"""Requests to train that are wrong in every way: each is valid, or refused with one message that names the key; none crashes.

A slice here, ten thousand in the soak. Nothing is started and nothing written: a request is only prepared, which is all that
``shoal train`` does before a process starts. What is refused is given to the command line too, for its exit code and its words.
"""

import contextlib
import io
import sys
import time

import pytest

from chaos.wild_recipes import RIGHT, Dice, write
from shoal.cli import main as command
from shoal.cli.train import OwnParts
from shoal.core.errors import RequestError
from shoal.trainer.request import TrainRequest, prepare

SLOW_SECONDS = 5.0
"""A request takes milliseconds; one that lays a wrong number out before it looks at it takes minutes, or all memory."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where requests are made; code that they name without being allowed to would be found there, and tell."""
    (tmp_path / "canary.py").write_text("raise SystemExit('the code of a recipe was run')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def ask(folder, wild):
    """None where the request is valid, else what is said of it."""
    path = folder / "wild.toml"
    path.write_bytes(wild.data)
    request = TrainRequest(
        recipe=path,
        plan=wild.plan,
        num_processes=wild.num_processes,
        overrides=wild.overrides,
        run_dir=folder / "run",
    )
    try:
        prepare(request, own=OwnParts())
    except RequestError as error:
        return str(error)
    return None


def refusal_of_the_command(folder, wild):
    """What the command says of a request that was refused."""
    arguments = ["train", str(folder / "wild.toml"), "--run-dir", str(folder / "run")]
    arguments += ["--plan", wild.plan] if wild.plan is not None else []
    for override in wild.overrides:
        arguments += ["--set", override]
    arguments += ["--nproc", str(wild.num_processes)] if wild.num_processes else []
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
        command._run(arguments, debug=False)
    assert ended.value.code == 2, err.getvalue()
    assert not out.getvalue()
    return err.getvalue()


def sweep(folder, seed, number):
    """Draw requests and judge the answers; how many typos there were, and of how many the right name was offered."""
    dice = Dice(seed)
    before = sorted(folder.iterdir())
    typos, right, refused = 0, 0, 0
    for count in range(number):
        wild = dice.draw()
        started = time.monotonic()
        said = ask(folder, wild)
        assert time.monotonic() - started < SLOW_SECONDS, wild
        assert "canary" not in sys.modules, wild
        if said is None:
            assert not wild.meant, f"a misspelt key was let in: {wild}"
            continue
        refused += 1
        assert said.strip() and "Traceback" not in said, wild
        # The path, or the bare name where the numbers of two keys do not go together.
        assert not wild.path or wild.path in said or wild.path.rpartition(".")[2] in said, f"{wild}: {said}"
        if wild.meant:
            typos += 1
            right += f"did you mean {wild.meant!r}?" in said
        if count % 10 == 0:
            shown = refusal_of_the_command(folder, wild)
            assert shown.startswith("error: ") and "Traceback" not in shown and "--debug" not in shown, shown
    assert sorted(path for path in folder.iterdir() if path.name not in ("wild.toml", "__pycache__")) == before
    assert refused > number / 2 and typos > number / 10
    return typos, right


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("seed", "number"), [(1, 300), *(pytest.param(seed, 1000, marks=pytest.mark.soak) for seed in range(2, 12))]
)
def test_every_request_is_valid_or_refused_by_name(folder, seed, number):
    typos, right = sweep(folder, seed, number)
    assert right >= 0.9 * typos, f"of {typos} typos of one letter {right} were understood"


def test_the_requests_that_are_changed_are_right_before(folder):
    for tables in RIGHT:
        (folder / "wild.toml").write_text(write(tables))
        prepare(TrainRequest(recipe=folder / "wild.toml", run_dir=folder / "run"), own=OwnParts())


@pytest.mark.parametrize(
    ("plan", "overrides", "words"),
    [
        ("cp=0", (), ["cp=0"]),
        ("pp=2147483648", (), ["pp=2147483648", "1024"]),
        (None, ("train.global_batch=1" + "0" * 400,), ["train.global_batch", "1329 bits", "63"]),
        (None, ("train.time_limit=soon",), ["train.time_limit", "'soon'"]),
        (None, ("model.name=gtp",), ["model.name", "'gtp'", "did you mean 'gpt'?"]),
    ],
)
def test_what_the_sweep_found(folder, plan, overrides, words):
    """A division by zero, a schedule of two thousand million ranks, an overflow, and three messages without the key."""
    (folder / "wild.toml").write_text(write(RIGHT[0]))
    request = TrainRequest(recipe=folder / "wild.toml", plan=plan, overrides=overrides, run_dir=folder / "run")
    with pytest.raises(RequestError) as refused:
        prepare(request, own=OwnParts())
    assert all(word in str(refused.value) for word in words), refused.value
