"""What etcd may be asked with: no password in an address, none in plain text, no secret that others can read."""

import pytest

from shoal.core.errors import RequestError
from shoal.elastic.election.etcd import EtcdAccess, check_access, read_login


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "login"
    path.write_text("shoal:a:b\n")
    path.chmod(0o600)
    return path


def test_plain_http_stays_on_this_machine():
    assert check_access("http://127.0.0.1:2379/run", EtcdAccess()).hostname == "127.0.0.1"
    assert check_access("https://etcd.example:2379/run", EtcdAccess()).hostname == "etcd.example"
    with pytest.raises(
        RequestError, match=r"http://10\.0\.0\.1:2379 leaves this machine in plain text.* write https://"
    ):
        check_access("http://10.0.0.1:2379", EtcdAccess())


@pytest.mark.parametrize(
    ("url", "options", "says"),
    [
        ("etcd:2379", {}, "is no address of etcd"),
        ("https://me:secret@h:2379/k", {}, "where every user of this machine can read it"),
        ("http://127.0.0.1:2379", {"login": "x"}, "elastic.etcd_login is for https"),
        ("https://h:2379", {"cert": "c"}, "elastic.etcd_cert is given without elastic.etcd_key"),
        ("https://h:2379", {"key": "c"}, "elastic.etcd_key is given without elastic.etcd_cert"),
        ("https://h:2379", {"ca": "/no/such/file"}, "elastic.etcd_ca: cannot read /no/such/file"),
    ],
)
def test_what_is_refused(url, options, says):
    with pytest.raises(RequestError, match=says) as error:
        check_access(url, EtcdAccess(**options))
    assert "secret" not in str(error.value)


def test_a_login_is_one_line_for_its_owners_eyes(secret):
    assert read_login(str(secret)) == ("shoal", "a:b")
    check_access("https://h:2379", EtcdAccess(login=str(secret)))
    secret.chmod(0o640)
    with pytest.raises(RequestError, match=r"mode 0640: others can read it; run `chmod 600"):
        check_access("https://h:2379", EtcdAccess(login=str(secret)))
    secret.chmod(0o600)
    for text in ("", "shoal", "shoal:", ":b", "shoal:a\nshoal:b"):
        secret.write_text(text)
        with pytest.raises(RequestError, match="one line USER:PASSWORD"):
            read_login(str(secret))
