"""How a candidate proves to etcd who it is, and etcd to it: certificates for https, a user and a password. No torch.

What is secret comes from files, never from the command line, where every user of the machine can read it.
"""

import os
import stat
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

from shoal.comm.wire.addresses import is_loopback
from shoal.core.errors import RequestError
from shoal.elastic.config import ElasticConfig

_LOGIN_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class EtcdAccess:
    """The files that the recipe names."""

    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    login: str | None = None

    @classmethod
    def of(cls, config: ElasticConfig) -> "EtcdAccess":
        """What a recipe says."""
        return cls(ca=config.etcd_ca, cert=config.etcd_cert, key=config.etcd_key, login=config.etcd_login)

    @property
    def options(self) -> dict[str, Any]:
        """In the words of etcd3gw."""
        return {"ca_cert": self.ca, "cert_cert": self.cert, "cert_key": self.key}


def check_access(url: str, access: EtcdAccess) -> SplitResult:
    """The parts of an address of etcd that can be used with these files.

    Raises:
        RequestError: no such address, plain http beyond this machine or with a password, or a file that cannot be used.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise RequestError(f"{url!r} is no address of etcd; write http://HOST:2379 or https://HOST:2379")
    if parts.username is not None or parts.password is not None:
        raise RequestError(
            "the address of etcd has a user or a password in it, where every user of this machine can read it; write "
            "USER:PASSWORD into a file and name that as elastic.etcd_login"
        )
    if parts.scheme == "http" and not is_loopback(parts.hostname):
        raise RequestError(
            f"{url} leaves this machine in plain text: anybody on the way could make himself the center; write https://, with "
            "elastic.etcd_ca for a certificate of your own"
        )
    given = [name for name in ("ca", "cert", "key", "login") if getattr(access, name) is not None]
    if parts.scheme == "http" and given:
        raise RequestError(f"{url} is plain http, and elastic.etcd_{given[0]} is for https; write https://")
    if (access.cert is None) != (access.key is None):
        there, missing = ("cert", "key") if access.key is None else ("key", "cert")
        raise RequestError(
            f"elastic.etcd_{there} is given without elastic.etcd_{missing}; a client certificate needs both"
        )
    for name in ("ca", "cert"):
        if getattr(access, name) is not None:
            _read(getattr(access, name), f"elastic.etcd_{name}", is_secret=False)
    if access.key is not None:
        _read(access.key, "elastic.etcd_key", is_secret=True)
    if access.login is not None:
        read_login(access.login)
    return parts


def read_login(path: str) -> tuple[str, str]:
    """The user and the password in a file with one line ``USER:PASSWORD``.

    Raises:
        RequestError: it cannot be read, others can read it, or it has no such line.
    """
    text = _read(path, "elastic.etcd_login", is_secret=True)
    user, colon, password = text.strip("\r\n").partition(":")
    if not user or not colon or not password or "\n" in password:
        raise RequestError(f"elastic.etcd_login: {path} does not have one line USER:PASSWORD")
    return user, password


def _read(path: str, setting: str, *, is_secret: bool) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        with open(descriptor, encoding="utf-8") as file:
            mode = os.fstat(descriptor).st_mode
            text = file.read(_LOGIN_BYTES) if stat.S_ISREG(mode) else ""
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{setting}: cannot read {path}: {error}") from error
    if is_secret and mode & 0o077:
        raise RequestError(f"{setting}: {path} has mode {mode & 0o777:04o}: others can read it; run `chmod 600 {path}`")
    return text
