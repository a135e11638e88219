"""Who may ask. A page that any site can make a browser open must not read a run, nor must other users of the machine.

The address that is printed has a code that works once. Whoever comes with it gets the session's key as a cookie that scripts
cannot read and other sites cannot send. Programs give a token instead. Requests under another host's name (a name that was
pointed at this machine) and those that another site's page sends are refused, whatever they have.
"""

import contextlib
import hmac
import ipaddress
import os
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

_SESSION_SECONDS = 7 * 24 * 3600
_LEAST_KEY = 32


@dataclass(frozen=True)
class Refusal:
    """Why a request gets no answer."""

    status: int
    reason: str


class Access:
    """Keys of one server.

    Args:
        port: that it listens on: cookies know no ports, so it is in their name.
        token: of the token file; None where there is none.
        session: the key that a cookie holds.
        names: hosts by which the server may be called.
    """

    def __init__(self, *, port: int, token: str | None, session: str, names: frozenset[str]) -> None:
        self.cookie = f"shoal-dash-{port}"
        self._token, self._session, self._names = token, session, names
        self._code: str | None = None

    def new_code(self) -> str:
        """A code for one browser; an older one is void."""
        self._code = secrets.token_urlsafe(18)
        return self._code

    def enter(self, code: str) -> str | None:
        """The cookie for whoever has the code, which is void from here on; None for others."""
        if self._code is None or not _same(code, self._code):
            return None
        self._code = None
        return f"{self.cookie}={self._session}; HttpOnly; SameSite=Strict; Path=/; Max-Age={_SESSION_SECONDS}"

    def refusal_of_place(self, headers: Mapping[str, str]) -> Refusal | None:
        """Why a request may not have come from where it says; None where it may."""
        host = headers.get("host", "")
        name = host_name(host)
        if name is None or name not in self._names:
            return Refusal(403, "this server is not called by that name; open the address that it printed")
        origin = headers.get("origin")
        if origin is not None and not _is_own(origin, host):
            return Refusal(403, "a page of another site asks")
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return Refusal(403, "a page of another site asks")
        return None

    def has_key(self, headers: Mapping[str, str]) -> bool:
        """True for a request with the session's cookie, or with the token."""
        given = headers.get("authorization", "")
        if self._token is not None and _same(given, f"Bearer {self._token}"):
            return True
        return any(_same(value, self._session) for value in _cookies(headers.get("cookie", ""), self.cookie))


def _same(given: str, wanted: str) -> bool:
    # In a time that does not tell how much of it is right.
    return hmac.compare_digest(given.encode(), wanted.encode())


def _cookies(header: str, name: str) -> list[str]:
    pairs = [part.strip().partition("=") for part in header.split(";")]
    return [value for key, _, value in pairs if key == name]


def host_name(host: str) -> str | None:
    """The name in a ``Host`` header, in small letters and without its port; None for what is no such header."""
    try:
        found = urlsplit(f"//{host}")
        _ = found.port
    except ValueError:
        return None
    if not found.hostname or found.path or found.username is not None or found.query or found.fragment:
        return None
    return found.hostname.rstrip(".")


def _is_own(origin: str, host: str) -> bool:
    scheme, _, rest = origin.partition("://")
    return scheme in ("http", "https") and rest.lower() == host.lower()


def own_names(host: str) -> frozenset[str]:
    """The names by which a server may be called that listens at an address."""
    names = {"127.0.0.1", "localhost", "::1", host.lower()}
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_unspecified:
            names |= _names_of_machine()
    return frozenset(names)


def _names_of_machine() -> set[str]:
    name = socket.gethostname().lower()
    found = {name, name.partition(".")[0]}
    with contextlib.suppress(OSError):
        found |= {str(address[4][0]).lower() for address in socket.getaddrinfo(name, None)}
    return found


def session_key(folder: Path) -> str:
    """The key of this user's sessions, so that a browser goes on where the server was started again; a new one each week.

    It is in a file that only the user may read; where it cannot be kept there, it lasts as long as the server.
    """
    file = folder / "session.key"
    with contextlib.suppress(OSError, ValueError):
        status = file.lstat()
        if status.st_uid == os.getuid() and not status.st_mode & 0o077 and file.is_file() and not file.is_symlink():
            found = file.read_text("ascii").strip()
            if len(found) >= _LEAST_KEY and found.isprintable() and time.time() - status.st_mtime < _SESSION_SECONDS:
                return found
    key = secrets.token_urlsafe(32)
    beside = folder / f".session.{secrets.token_hex(8)}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
            opened.write(key)
        os.replace(beside, file)
    return key
