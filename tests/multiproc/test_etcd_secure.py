"""The election by a real etcd over https, with certificates made here, a client certificate and a password."""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.core.clock import Deadline
from shoal.core.errors import RequestError
from shoal.elastic.election.etcd import EtcdAccess, EtcdLease, find_center
from support.processes.command import wait_until

pytestmark = pytest.mark.skipif(
    shutil.which("etcd") is None or shutil.which("openssl") is None, reason="needs the programs etcd and openssl"
)
TIED = """
import os, sys
from shoal.comm.parentdeath import die_with_parent
die_with_parent(int(sys.argv[1]))
os.execvp(sys.argv[2], sys.argv[2:])
"""


def openssl(folder: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=60)


def make_certificates(folder: Path) -> None:
    """An authority and one that nobody trusts; certificates of both for this machine, and one with a common name."""
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    (folder / "ext").write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
    for authority in ("ca", "other"):
        made = ("-keyout", f"{authority}.key", "-out", f"{authority}.pem")
        openssl(folder, "req", "-x509", *curve, *made, "-subj", f"/CN={authority}")
    for authority, name, subject in (("ca", "us", "/O=us"), ("other", "they", "/O=they"), ("ca", "named", "/CN=us")):
        openssl(folder, "req", *curve, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", subject)
        signing = ("-CA", f"{authority}.pem", "-CAkey", f"{authority}.key", "-CAcreateserial", "-extfile", "ext")
        openssl(folder, "x509", "-req", "-in", f"{name}.csr", *signing, "-out", f"{name}.pem")
    for key in folder.glob("*.key"):
        key.chmod(0o600)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("etcd")
    make_certificates(made)
    for name, text in (("login", "shoal:right"), ("wrong", "shoal:wrong"), ("guest", "guest:guest")):
        (made / name).write_text(text + "\n")
        (made / name).chmod(0o600)
    return made


def access(folder: Path, **names: str | None) -> EtcdAccess:
    given = {"ca": "ca.pem", "cert": "us.pem", "key": "us.key", "login": "login", **names}
    return EtcdAccess(**{name: str(folder / file) for name, file in given.items() if file is not None})


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    pytest.importorskip("etcd3gw")
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    client, peer = (
        f"{scheme}://127.0.0.1:{one.getsockname()[1]}" for scheme, one in zip(("https", "http"), sockets, strict=True)
    )
    for one in sockets:
        one.close()
    command = ["etcd", "--data-dir", str(folder / "data"), "--log-level", "error"]
    command += ["--listen-client-urls", client, "--advertise-client-urls", client]
    command += [
        "--listen-peer-urls",
        peer,
        "--initial-advertise-peer-urls",
        peer,
        "--initial-cluster",
        f"default={peer}",
    ]
    command += [
        "--cert-file",
        "us.pem",
        "--key-file",
        "us.key",
        "--trusted-ca-file",
        "ca.pem",
        "--client-cert-auth",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", TIED, str(os.getpid()), *command], cwd=folder, stderr=log, stdout=log
        )
    try:
        wait_until(lambda: process.poll() is not None or answers(folder, client), "etcd to answer")
        assert process.poll() is None, (folder / "log").read_text()
        demand_passwords(folder, client)
        yield client
    finally:
        process.kill()
        process.wait()


def raw_client(folder: Path, url: str):
    import etcd3gw

    host, port = url.removeprefix("https://").split(":")
    client = etcd3gw.Etcd3Client(host=host, port=int(port), protocol="https", timeout=5, **access(folder).options)
    client.session.trust_env = False
    return client


def answers(folder: Path, url: str) -> bool:
    import etcd3gw

    try:
        return bool(raw_client(folder, url).status())
    except etcd3gw.exceptions.Etcd3Exception:
        return False


def demand_passwords(folder: Path, url: str) -> None:
    """From here on a user with a password is needed, and only one of the two may touch the election."""
    client = raw_client(folder, url)

    def ask(path: str, **values: object) -> None:
        client.post(client.get_url(f"/auth/{path}"), json=values)

    for user, password in (("root", "root"), ("shoal", "right"), ("guest", "guest")):
        ask("user/add", name=user, password=password)
    for role in ("root", "elect"):
        ask("role/add", name=role)
    # From "run/" to "run0", in base 64: everything that begins with "run/".
    ask("role/grant", name="elect", perm={"permType": "READWRITE", "key": "cnVuLw==", "range_end": "cnVuMA=="})
    ask("user/grant", user="root", role="root")
    ask("user/grant", user="shoal", role="elect")
    ask("enable")


def lease(url: str, given: EtcdAccess, name: str = "a") -> EtcdLease:
    return EtcdLease(url, key="run/1", name=name, address=f"ipc://{name}", lease_seconds=2.0, access=given)


def test_a_candidate_with_certificates_and_a_password_is_elected(folder: Path, url: str) -> None:
    async def work() -> None:
        one = lease(url, access(folder))
        epoch = await asyncio.wait_for(one.campaign(), 20)
        assert one.is_valid()
        found = await find_center(url, key="run/1", deadline=Deadline(seconds=10), access=access(folder))
        assert (found.name, found.epoch) == ("a", epoch)
        # A token that etcd has forgotten is asked for again.
        one._store.client.session.headers["Authorization"] = "forgotten.1"
        await one.renew()
        assert await one.advance() == epoch + 1
        await one.resign()

    asyncio.run(work())


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ({"ca": "other.pem"}, r"certificate verify failed.*elastic\.etcd_ca"),
        ({"cert": None, "key": None}, r"(certificate required|bad certificate).*elastic\.etcd_cert"),
        ({"cert": "they.pem", "key": "they.key"}, r"(bad certificate|unknown ca).*elastic\.etcd_cert"),
        ({"cert": "named.pem", "key": "named.key"}, r"commonname of client.*without a common name"),
        ({"login": "wrong"}, r"invalid user id or password.*elastic\.etcd_login"),
        ({"login": None}, r"user name is empty.*elastic\.etcd_login"),
        ({"login": "guest"}, r"permission denied.*elastic\.etcd_login"),
    ],
)
def test_one_that_is_not_let_in_says_why_and_ends(
    folder: Path, url: str, names: dict[str, str | None], says: str
) -> None:
    async def work() -> None:
        with pytest.raises(RequestError, match=says):
            await asyncio.wait_for(lease(url, access(folder, **names), "b").campaign(), 20)

    asyncio.run(work())
