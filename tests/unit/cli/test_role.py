"""``shoal role``: a wrong request gets one message and exit code 2, before anything listens or is written."""

import pytest
from typer.testing import CliRunner

from shoal.cli.role import app
from shoal.comm.wire.keys import make_keys
from shoal.core.errors import RequestError

PLAN = ("--plan", "ps=2 workers=2 backup=1")
THREE = "tcp://10.0.0.1:7000,tcp://10.0.0.2:7000,tcp://10.0.0.3:7000"


def refuse(*arguments) -> str:
    """The message of a command that ends with exit code 2."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if isinstance(result.exception, RequestError):
        assert result.exception.exit_code == 2
        return str(result.exception)
    assert result.exit_code == 2, result.output
    return result.output


@pytest.fixture
def key(tmp_path):
    make_keys(tmp_path / "key")
    return tmp_path / "key"


def server(tiny, *more):
    return ("server", tiny, "--index", 0, "--run-dir", tiny.parent / "run", *more)


def test_an_unknown_role():
    assert "boss" in refuse("boss", "recipe.toml")


@pytest.mark.parametrize(
    ("role", "missing"),
    [
        (("center", "--centers", THREE, "--run-dir", "r"), "--listen"),
        (("server", "--centers", THREE, "--index", 0, "--run-dir", "r"), "--listen"),
        (("server", "--centers", THREE, "--listen", "tcp://127.0.0.1:0", "--run-dir", "r"), "--index"),
        (("worker", "--index", 0), "--centers"),
    ],
)
def test_what_a_role_cannot_do_without(tiny, role, missing):
    assert missing in refuse(role[0], tiny, *role[1:])


def test_a_worker_that_is_a_group_of_processes(tiny):
    said = refuse(
        *server(
            tiny, "--plan", "ps=2 workers=2 tp=2", "--listen", "tcp://127.0.0.1:0", "--centers", "tcp://127.0.0.1:7"
        )
    )
    assert "a worker is a group of 2 processes, and roles that start by themselves are one process each" in said
    assert not (tiny.parent / "run").exists()


def test_tcp_beyond_loopback_without_keys(tiny):
    said = refuse(*server(tiny, *PLAN, "--listen", "tcp://10.0.0.4:7001", "--centers", THREE))
    assert "shoal keys new" in said
    assert not (tiny.parent / "run").exists()


def test_tcp_on_loopback_without_keys(tiny):
    said = refuse(*server(tiny, *PLAN, "--listen", "tcp://127.0.0.1:0", "--centers", "tcp://127.0.0.1:1"))
    assert "every user of this machine can connect there" in said and "--keys" in said
    assert not (tiny.parent / "run").exists()


def test_a_candidate_that_is_not_on_the_list(tiny, key):
    said = refuse(
        *("center", tiny, *PLAN, "--keys", key, "--run-dir", tiny.parent / "run"),
        *("--centers", THREE, "--listen", "tcp://10.0.0.9:7000"),
    )
    assert "--centers does not contain --listen tcp://10.0.0.9:7000" in said


def test_a_password_of_etcd_that_others_can_read(tiny, key, tmp_path):
    (tmp_path / "login").write_text("shoal:secret")
    (tmp_path / "login").chmod(0o644)
    said = refuse(
        *("center", tiny, *PLAN, "--keys", key, "--run-dir", tiny.parent / "run", "--centers", "tcp://127.0.0.1:7"),
        *("--listen", "tcp://127.0.0.1:7", "--etcd", "https://127.0.0.1:1/k"),
        *("--set", f"elastic.etcd_login='{tmp_path}/login'"),
    )
    assert "elastic.etcd_login" in said and "chmod 600" in said


def test_a_key_that_others_can_read(tiny, key):
    key.chmod(0o644)
    assert "chmod 600" in refuse("worker", tiny, *PLAN, "--index", 0, "--centers", THREE, "--keys", key)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ("dp=2", "has no parameter servers, so there is no worker"),
        ("ps=2 workers=3", "not divisible by workers 3"),
        ("ps=2 workers=2 update=soon", "soon"),
        ("ps=1 workers=2 backup=1", "backup"),
    ],
)
def test_a_wrong_plan(tiny, plan, says):
    assert says in refuse("worker", tiny, "--plan", plan, "--index", 0, "--centers", "tcp://127.0.0.1:1")


def test_a_folder_that_holds_a_run(tiny, key):
    run = tiny.parent / "run"
    run.mkdir()
    (run / "summary.json").write_text("{}")
    said = refuse(
        *server(tiny, *PLAN, "--listen", "tcp://127.0.0.1:0", "--centers", "tcp://127.0.0.1:1", "--keys", key)
    )
    assert "add --resume" in said
