"""``shoal keys``: files with the right modes, nothing overwritten, a key that others can read is refused."""

import json

import pytest
from typer.testing import CliRunner

from shoal.cli.keys import app
from shoal.core.errors import RequestError


def run(*arguments):
    """Exit code, stdout, and the error that the command line would print."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        assert isinstance(result.exception, RequestError), result.exception
        return result.exception.exit_code, result.stdout, str(result.exception)
    return result.exit_code, result.stdout, ""


def test_new_makes_two_files_and_show_reads_them(tmp_path):
    code, out, _ = run("new", tmp_path / "key", "--json", tmp_path / "out.json")
    public = (tmp_path / "key.pub").read_text().strip()
    assert code == 0 and public in out and (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    assert json.loads((tmp_path / "out.json").read_text())["public"] == public
    secret = (tmp_path / "key").read_text().split("\nsecret ")[1].strip()
    assert len(secret) == 64 and secret not in out
    assert run("show", tmp_path / "key") == (0, f"{public}\n", "")


@pytest.mark.parametrize("taken", ["key", "key.pub"])
def test_nothing_is_overwritten(tmp_path, taken):
    (tmp_path / taken).write_text("mine")
    code, _, error = run("new", tmp_path / "key")
    assert code == 2 and f"{taken} exists" in error and (tmp_path / taken).read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == [taken]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_key_that_others_can_use_is_refused(tmp_path, mode):
    run("new", tmp_path / "key")
    (tmp_path / "key").chmod(mode)
    code, out, error = run("show", tmp_path / "key")
    assert code == 2 and not out and f"{mode:04o}" in error and "chmod 600" in error


def test_what_is_no_key_is_refused(tmp_path):
    run("new", tmp_path / "key")
    run("new", tmp_path / "other")
    whole, other = (tmp_path / "key").read_text(), (tmp_path / "other").read_text()
    mixed = whole.split("secret")[0] + "secret" + other.split("secret")[2]
    for text in ("", "public abc\nsecret def\n", whole.replace("secret ", "sekret "), mixed, "\xff" * 10):
        (tmp_path / "key").write_text(text)
        code, _, error = run("show", tmp_path / "key")
        assert code == 2 and "shoal keys new" in error, text
    assert run("show", tmp_path / "missing")[0] == 2
    assert run("show", tmp_path)[0] == 2
