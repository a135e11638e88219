"""The election where a cluster already has etcd: one key under a lease, and a counter that is changed in the same transaction.

The key exists for as long as its owner keeps the lease alive; the counter is the epoch and outlives everybody. A transaction
takes the key only if nobody has it, and gives out an epoch only if the counter is what was read: so an epoch has one owner. etcd
says itself that its leases exclude nobody by themselves, and the epoch on every message is what does.

The leader counts its lease from when it sent the question, on its own clock, and asks etcd for a longer one. Needs ``etcd3gw``.

A candidate proves to etcd who it is, and etcd to it, by certificates for https and by a user and a password. What is secret comes
from files, never from the command line, where every user of the machine can read it.
"""

import asyncio
import base64
import json
import math
import os
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

from shoal.comm.wire.addresses import is_loopback
from shoal.comm.wire.listener import Request
from shoal.core.clock import Deadline
from shoal.core.errors import RequestError
from shoal.elastic.config import ElectionConfig
from shoal.elastic.election.elector import Center, Deposed
from shoal.elastic.election.filelease import boot_seconds
from shoal.elastic.election.majority import Found, Seek

_LOGIN_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class EtcdAccess:
    """The files that the recipe names."""

    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    login: str | None = None

    @classmethod
    def of(cls, config: ElectionConfig) -> "EtcdAccess":
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


_POLL_SECONDS = 0.1
_MARGIN = 0.1
"""The part of the lease that the leader itself does not use: time for an instruction on its way out."""
_TRIES_PER_LEASE = 6

_HOPELESS = {
    "certificate verify failed": "name the file with its authority as elastic.etcd_ca, and use a name that its certificate has",
    "certificate required": "name a client certificate as elastic.etcd_cert and elastic.etcd_key",
    "bad certificate": "name another client certificate as elastic.etcd_cert and elastic.etcd_key",
    "unknown ca": "name a client certificate that etcd trusts as elastic.etcd_cert and elastic.etcd_key",
    "commonname of client": "where etcd asks for passwords, elastic.etcd_cert must be one without a common name (CN)",
    "invalid user id or password": "correct the line USER:PASSWORD in the file elastic.etcd_login",
    "user name is empty": "name a file with the line USER:PASSWORD as elastic.etcd_login",
    "permission denied": "give the user of elastic.etcd_login the right to read and write this key",
}
"""What etcd or TLS says when trying again cannot help, and the fix."""
_OPEN = EtcdAccess()

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class _Read:
    """Both keys as one transaction saw them."""

    epoch: int
    epoch_revision: int
    """0 when there is no counter yet."""
    leader: dict[str, Any] | None
    leader_revision: int


class _Store:
    """The two keys in etcd. Every call blocks, for a third of a lease at most, and may raise one of ``failures``."""

    def __init__(self, url: str, key: str, *, timeout: float, access: EtcdAccess) -> None:
        parts = check_access(url, access)
        try:
            import etcd3gw
        except ImportError as error:
            raise RequestError(
                "an election by etcd needs the package etcd3gw; run `pip install 'shoal[etcd]'`"
            ) from error
        # Its own exceptions; those of requests, which it lets through where etcd dies in the middle of an answer; and what comes
        # of an answer that is not one: a gateway without a leader says so with status 200 and no result.
        self.failures: tuple[type[Exception], ...] = (etcd3gw.exceptions.Etcd3Exception, OSError, LookupError)
        assert parts.hostname is not None, "it was checked"
        self.client = etcd3gw.Etcd3Client(
            host=parts.hostname, port=parts.port or 2379, protocol=parts.scheme, timeout=timeout, **access.options
        )
        # Neither a proxy nor other certificates than those that the recipe names.
        self.client.session.trust_env = False
        self.url = url
        self.epoch_key, self.leader_key = f"{key}/epoch", f"{key}/leader"
        self._access = access
        self._has_answered = False
        # A session of the library must not be used by two threads at once.
        self._lock = threading.Lock()

    async def run(self, work: Callable[[], T]) -> T:
        """Call something that blocks, in a thread.

        Raises:
            RequestError: etcd has never let this process in, and says why.
        """

        def locked() -> T:
            with self._lock:
                try:
                    found = self._do(work)
                except self.failures as error:
                    if not self._has_answered:
                        self._refuse(error)
                    raise
                self._has_answered = True
                return found

        return await asyncio.to_thread(locked)

    def _do(self, work: Callable[[], T]) -> T:
        if self._access.login is not None and "Authorization" not in self.client.session.headers:
            self._log_in(self._access.login)
        try:
            return work()
        except self.failures as error:
            # Tokens are forgotten when they are not used for a while, and when etcd starts again.
            if self._access.login is None or "invalid auth token" not in _detail(error):
                raise
            self._log_in(self._access.login)
            return work()

    def _log_in(self, file: str) -> None:
        user, password = read_login(file)
        self.client.session.headers.pop("Authorization", None)
        answer = self.client.post(self.client.get_url("/auth/authenticate"), json={"name": user, "password": password})
        self.client.session.headers["Authorization"] = answer["token"]

    def _refuse(self, error: Exception) -> None:
        """End what would be tried for ever: certificates, a password or rights that are wrong do not get better."""
        detail = _detail(error)
        for words, fix in _HOPELESS.items():
            if words in detail.lower().replace("_", " "):
                raise RequestError(
                    f"etcd at {self.url} and this process do not trust each other ({words}); {fix}"
                ) from error

    def read(self) -> _Read:
        """Both keys."""
        asked = [{"request_range": {"key": _encode(key)}} for key in (self.epoch_key, self.leader_key)]
        answer = self.client.transaction({"compare": [], "success": asked, "failure": []})
        counter, leader = (one["response_range"].get("kvs", [None])[0] for one in answer["responses"])
        return _Read(
            epoch=0 if counter is None else int(_decode(counter["value"])),
            epoch_revision=0 if counter is None else int(counter["mod_revision"]),
            leader=None if leader is None else json.loads(_decode(leader["value"])),
            leader_revision=0 if leader is None else int(leader["mod_revision"]),
        )

    def take(self, before: _Read, *, said: dict[str, Any], lease: int) -> bool:
        """Take the epoch after the one that was read, if neither key has changed since."""
        compare = [
            _unchanged(self.epoch_key, before.epoch_revision),
            _unchanged(self.leader_key, before.leader_revision),
        ]
        puts = [
            {"request_put": {"key": _encode(self.epoch_key), "value": _encode(str(before.epoch + 1))}},
            {"request_put": {"key": _encode(self.leader_key), "value": _encode(json.dumps(said)), "lease": lease}},
        ]
        answer = self.client.transaction({"compare": compare, "success": puts, "failure": []})
        return bool(answer.get("succeeded", False))


class EtcdLease:
    """One candidate. See ``Elector``.

    Args:
        url: of etcd, ``http://HOST:2379``.
        key: under which the election is held; one for each run.
        name: who this is, for people.
        address: where the members find this candidate when it leads.
        lease_seconds: how long a leader may be silent. etcd counts whole seconds, and not fewer than about two.
        access: certificates and a password.

    Raises:
        RequestError: no such address, a file that cannot be used, or the package etcd3gw is not there.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str,
        name: str,
        address: str,
        lease_seconds: float = 3.0,
        access: EtcdAccess = _OPEN,
    ) -> None:
        self.name = name
        self.address = address
        self.lease_seconds = lease_seconds
        self._store = _Store(url, key, timeout=lease_seconds / 3, access=access)
        self._lease: Any = None
        self._epoch = 0
        self._runs_out_at = float("-inf")

    @property
    def epoch(self) -> int:
        """See ``Elector``."""
        return self._epoch

    async def campaign(self) -> int:
        """See ``Elector``. While etcd cannot be reached it goes on trying."""
        self._runs_out_at = float("-inf")
        while True:
            try:
                if await self._attempt():
                    return self._epoch
            except self._store.failures:
                # Whether the last transaction was made is not known; the lease that it may be under is given back.
                await self._revoke()
            await asyncio.sleep(_POLL_SECONDS)

    async def advance(self) -> int:
        """See ``Elector``."""
        wanted = self._epoch + 1

        def take() -> bool:
            before = self._store.read()
            if self._is_ours(before, wanted):
                # An answer was lost on its way; the epoch is ours already.
                return True
            if not self._is_ours(before, wanted - 1):
                return False
            return self._store.take(before, said=self._said(wanted), lease=self._lease.id)

        await self._insist(take, f"epoch {wanted} was refused to it")
        self._epoch = wanted
        return wanted

    async def renew(self) -> None:
        """See ``Elector``."""

        def refresh() -> bool:
            return bool(self._lease.refresh() > 0) and self._is_ours(self._store.read(), self._epoch)

        await self._insist(refresh, "its lease was not renewed")

    def is_valid(self) -> bool:
        """See ``Elector``."""
        return boot_seconds() < self._runs_out_at - _MARGIN * self.lease_seconds

    async def resign(self) -> None:
        """See ``Elector``."""
        self._runs_out_at = float("-inf")
        await self._revoke()

    async def answer(self, request: Request) -> None:
        """Answer a member who looks for the center."""
        if isinstance(request.body, Seek):
            is_leading = self.is_valid()
            await request.answer(Found(self._epoch, self.name, self.address) if is_leading else Found(0, "", ""))
        else:
            await request.refuse("stranger", f"{self.name} is elected by etcd and takes no part in another election")

    async def _attempt(self) -> bool:
        started = boot_seconds()
        before = await self._store.run(self._store.read)
        if before.leader is not None:
            return False
        # Longer than ours: etcd begins to count later than we do, and stops later.
        seconds = math.ceil(self.lease_seconds) + 1
        self._lease = await self._store.run(lambda: self._store.client.lease(ttl=seconds))
        said, lease = self._said(before.epoch + 1), self._lease.id
        if not await self._store.run(lambda: self._store.take(before, said=said, lease=lease)):
            await self._revoke()
            return False
        self._epoch = before.epoch + 1
        self._runs_out_at = started + self.lease_seconds
        if not self.is_valid():
            # It took too long, and nobody could lead before etcd forgets the key.
            await self._revoke()
        return self.is_valid()

    async def _insist(self, work: Callable[[], bool], why: str) -> None:
        """Do something that extends the lease, again and again while etcd does not answer and the lease lasts."""
        has_asked = False
        while boot_seconds() < self._runs_out_at:
            started, has_asked = boot_seconds(), True
            try:
                is_done = await self._store.run(work)
            except self._store.failures:
                await asyncio.sleep(self.lease_seconds / _TRIES_PER_LEASE)
                continue
            if is_done and boot_seconds() < self._runs_out_at:
                self._runs_out_at = started + self.lease_seconds
                return
            if not is_done:
                break
        else:
            lease = f"its lease of {self.lease_seconds:g} s"
            why = f"etcd at {self._store.url} did not answer within {lease}"
            if not has_asked:
                why = f"it did nothing for as long as {lease}; was this process or its machine paused?"
        await self.resign()
        raise Deposed(f"candidate {self.name!r} was deposed from epoch {self._epoch}: {why}; it may campaign again")

    async def _revoke(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            try:
                await self._store.run(lease.revoke)
            except self._store.failures:
                # It runs out by itself.
                pass

    def _said(self, epoch: int) -> dict[str, Any]:
        return {"epoch": epoch, "name": self.name, "address": self.address, "lease": str(self._lease.id)}

    def _is_ours(self, read: _Read, epoch: int) -> bool:
        return self._lease is not None and read.leader == self._said(epoch)


async def find_center(url: str, *, key: str, deadline: Deadline, access: EtcdAccess = _OPEN) -> Center:
    """Wait until somebody leads.

    Raises:
        RunError: nobody did within the deadline, or etcd did not answer.
    """
    store = _Store(url, key, timeout=1.0, access=access)
    problem = ""
    while True:
        try:
            leader = (await store.run(store.read)).leader
        except store.failures as error:
            leader, problem = None, f" (etcd at {url}: {error.__class__.__name__})"
        if leader is not None:
            return Center(epoch=int(leader["epoch"]), address=str(leader["address"]), name=str(leader["name"]))
        deadline.check(f"a center to be elected under {key!r}{problem}")
        await asyncio.sleep(_POLL_SECONDS)


def _detail(error: Exception) -> str:
    return str(getattr(error, "detail_text", None) or error)


def _encode(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _decode(text: str) -> str:
    return base64.b64decode(text).decode()


def _unchanged(key: str, revision: int) -> dict[str, Any]:
    """True in a transaction while the key is as it was; a revision of 0 stands for no key."""
    return {"key": _encode(key), "target": "MOD", "result": "EQUAL", "mod_revision": revision}
