"""Who may ask: names, origins, the code, the cookie, the token."""

import os
import time

import pytest

from shoal.dashboard.server.access import Access, host_name, own_names, session_key


@pytest.fixture
def access():
    return Access(port=6100, token="0123456789abcdef", session="the-session-key", names=own_names("127.0.0.1"))


@pytest.mark.parametrize(
    ("cookie", "is_key"),
    [
        ("shoal-dash-6100=the-session-key", True),
        ("a=b; shoal-dash-6100=the-session-key; c=d", True),
        ("shoal-dash-6100=wrong; shoal-dash-6100=the-session-key", True),
        ("shoal-dash-6100=the-session-kez", False),
        ("shoal-dash-6100=", False),
        ("shoal-dash-6101=the-session-key", False),
        ("xshoal-dash-6100=the-session-key", False),
        ("the-session-key", False),
        ("", False),
    ],
)
def test_only_the_right_cookie_is_a_key(access, cookie, is_key):
    assert access.has_key({"cookie": cookie}) is is_key


def test_only_the_right_token_is_a_key(access):
    assert access.has_key({"authorization": "Bearer 0123456789abcdef"})
    assert not access.has_key({"authorization": "Bearer 0123456789abcdeg"})
    assert not access.has_key({"authorization": "0123456789abcdef"})
    assert not Access(port=1, token=None, session="s", names=frozenset()).has_key({"authorization": "Bearer None"})


def test_a_code_works_once(access):
    code = access.new_code()
    assert access.enter("wrong") is None
    cookie = access.enter(code)
    assert cookie is not None and cookie.startswith("shoal-dash-6100=the-session-key;")
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
    assert access.enter(code) is None and access.enter("") is None
    other = access.new_code()
    assert other != code and access.enter(code) is None and access.enter(other) is not None


@pytest.mark.parametrize(
    "headers",
    [
        {}, {"host": ""}, {"host": "evil.example"}, {"host": "localhost.evil.example:6100"}, {"host": "127.0.0.1@evil.example"},
        {"host": "127.0.0.1:x"}, {"host": "[::1"}, {"host": "localhost/a"}, {"host": "localhost", "origin": "http://evil.example"},
        {"host": "localhost", "origin": "null"}, {"host": "localhost", "origin": "file://localhost"},
        {"host": "localhost:6100", "origin": "http://localhost:6101"}, {"host": "localhost", "sec-fetch-site": "cross-site"},
    ],
)  # fmt: skip
def test_foreign_names_and_origins_are_refused(access, headers):
    refusal = access.refusal_of_place(headers)
    assert refusal is not None and refusal.status == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "localhost:8888"}, {"host": "127.0.0.1:6100", "origin": "http://127.0.0.1:6100"}, {"host": "[::1]:6100"},
        {"host": "LOCALHOST", "sec-fetch-site": "same-origin"}, {"host": "localhost", "sec-fetch-site": "none"},
    ],
)  # fmt: skip
def test_own_names_also_through_a_tunnel_are_not(access, headers):
    assert access.refusal_of_place(headers) is None


def test_names_of_the_machine_are_own_where_it_listens_on_all():
    assert os.uname().nodename.lower() in own_names("0.0.0.0")
    assert os.uname().nodename.lower() not in own_names("127.0.0.1")
    assert host_name("Node.Example.:80") == "node.example"


def test_the_sessions_key_stays_for_a_week_and_is_the_users_alone(tmp_path):
    folder = tmp_path / "cache"
    key = session_key(folder)
    file = folder / "session.key"
    assert session_key(folder) == key and len(key) >= 32 and file.stat().st_mode & 0o077 == 0
    os.utime(file, (time.time() - 8 * 24 * 3600,) * 2)
    assert session_key(folder) != key


def test_a_key_that_others_may_read_or_that_is_a_link_is_not_used(tmp_path):
    key = session_key(tmp_path)
    (tmp_path / "session.key").chmod(0o644)
    assert session_key(tmp_path) != key
    (tmp_path / "elsewhere").write_text("x" * 40)
    (tmp_path / "session.key").unlink()
    os.symlink(tmp_path / "elsewhere", tmp_path / "session.key")
    assert session_key(tmp_path) != "x" * 40
    assert (tmp_path / "elsewhere").read_text() == "x" * 40


def test_a_folder_that_cannot_be_written_gives_a_key_all_the_same(tmp_path):
    (tmp_path / "file").write_text("")
    assert len(session_key(tmp_path / "file")) >= 32
