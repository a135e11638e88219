"""Hosts that come while a run goes on: those that were lost, those that were named and were not there at its start, and new ones.

The coordinator tries them again and again, and in turn with them hosts that are new in the host file, which is read each time:
such a one takes the place of a lost one, with its ranks. One that answers passes the admission that all have passed at the start
(versions, the run directory), while the others train; then its agent is asked for ranks, which enter between two steps.
"""

import contextlib
import os
import secrets
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.core.clock import Deadline
from shoal.core.errors import RequestError
from shoal.launch.hosts.admission import choose_addresses, version_problems
from shoal.launch.hosts.connection import Connection
from shoal.launch.hosts.coordinator import Coordinator
from shoal.launch.hosts.hostspec import HostSlots, choose_host, read_hostfile
from shoal.launch.hosts.messages import Enter, Entered

_AGAIN_SECONDS = 5.0
_ADMISSION_SECONDS = 60.0


@dataclass
class _Attempt:
    """One host that is not there."""

    old: Connection
    wait: Deadline
    """Until then it is not tried."""
    new: Connection | None = None
    token_file: Path | None = None
    token: str = ""
    limit: Deadline = field(default_factory=lambda: Deadline(seconds=0.0))
    tried: int = 0
    """How often somebody was tried."""
    told: set[str] = field(default_factory=set)
    """The hosts of which it was said once why they cannot come."""


class ReturningHosts:
    """Tries hosts again that are not there.

    Args:
        coordinator: has the lines to all hosts.
        run_dir: that all share.
        tell: shows the user a line.
    """

    def __init__(self, coordinator: Coordinator, run_dir: Path, *, tell: Callable[[str], None]) -> None:
        self._coordinator, self._run_dir, self._tell = coordinator, run_dir, tell
        self._attempts: dict[str, _Attempt] = {}

    def turn(self) -> list[tuple[Connection, Connection]]:
        """Go on with every attempt; the lost lines and the new ones of hosts that have come."""
        for connection in self._coordinator.connections:
            if connection.lost and connection.name not in self._attempts:
                # One that was cut off ends its ranks by itself, but not sooner.
                wait = Deadline(seconds=self._coordinator.lease_seconds if connection.hello is not None else 0.0)
                self._attempts[connection.name] = _Attempt(old=connection, wait=wait)
        found = []
        for attempt in list(self._attempts.values()):
            try:
                if self._advance(attempt):
                    assert attempt.new is not None
                    found.append((attempt.old, attempt.new))
                    self._forget_token(attempt)
                    del self._attempts[attempt.old.name]
            except (RequestError, OSError) as error:
                self._put_off(attempt, str(error))
        return found

    def take(self, connection: Connection, message: Any) -> bool:
        """Hear what a host says that is not in yet; False where it is another's."""
        attempt = next((one for one in self._attempts.values() if one.new is connection), None)
        if attempt is None:
            return False
        if isinstance(message, Entered):
            if message.problem or message.token != attempt.token:
                why = message.problem or "it does not share it with this machine"
                self._put_off(attempt, f"host {connection.name}: {self._run_dir} cannot be used: {why}")
            else:
                attempt.token = ""
        return True

    def close(self) -> None:
        """End every attempt."""
        for attempt in self._attempts.values():
            self._give_up(attempt, "it is not waited for any more")
        self._attempts = {}

    def _advance(self, attempt: _Attempt) -> bool:
        """Take the next step; True when the host is in."""
        new = attempt.new
        if new is None:
            if attempt.wait.is_over:
                host = self._choose(attempt)
                attempt.tried += 1
                attempt.new = self._coordinator.open_again(attempt.old, host)
                attempt.limit = Deadline(seconds=self._coordinator.fleet.connect_seconds)
            return False
        new.flush()
        if new.lost:
            raise RequestError(f"host {new.name}: {new.lost}")
        if new.hello is not None and attempt.token_file is None:
            self._check(new)
            self._ask_to_enter(attempt, new)
        if attempt.token_file is not None and not attempt.token:
            return True
        if attempt.limit.is_over:
            doing = "did not find the run directory" if attempt.token_file is not None else "had no agent"
            raise RequestError(f"host {new.name} {doing} within {attempt.limit.seconds:g} s")
        return False

    def _choose(self, attempt: _Attempt) -> HostSlots:
        """The host to be tried for a place."""
        old, file = attempt.old, self._coordinator.fleet.hostfile
        if file is None:
            return old.host
        coming = [one.new.name for one in self._attempts.values() if one.new is not None]
        present = {*(one.name for one in self._coordinator.connections), *coming}
        found = choose_host(old.host, read_hostfile(file), present, tried=attempt.tried)
        if found is None:
            raise RequestError(f"host {old.name} is not in {file} any more, and no host there is new; name one there")
        return found

    def _check(self, new: Connection) -> None:
        assert new.hello is not None
        living = {
            one.name: one.hello
            for one in self._coordinator.connections
            if one.hello is not None and not one.lost and one.name != new.name
        }
        if living and (problems := version_problems({**dict(list(living.items())[:1]), new.name: new.hello})):
            raise RequestError("\n".join(problems))
        chosen = choose_addresses({**living, new.name: new.hello}, network=self._coordinator.fleet.network)
        self._coordinator.interfaces[new.name] = chosen[new.name]

    def _ask_to_enter(self, attempt: _Attempt, new: Connection) -> None:
        attempt.token = secrets.token_hex(16)
        attempt.token_file = self._run_dir / f".door-{secrets.token_hex(4)}"
        with attempt.token_file.open("x", encoding="ascii") as file:
            file.write(attempt.token)
            file.flush()
            os.fsync(file.fileno())
        attempt.limit = Deadline(seconds=_ADMISSION_SECONDS)
        asked = Enter(
            run_dir=str(self._run_dir),
            token_file=str(attempt.token_file),
            lease_seconds=self._coordinator.lease_seconds,
            mode=stat.S_IMODE(os.stat(self._run_dir).st_mode),
        )
        new.send(asked)

    def _put_off(self, attempt: _Attempt, why: str) -> None:
        name = attempt.old.name if attempt.new is None else attempt.new.name
        if name not in attempt.told:
            attempt.told.add(name)
            self._tell(f"{why}; it is tried again every {_AGAIN_SECONDS:g} s")
        self._give_up(attempt, why)
        attempt.wait = Deadline(seconds=_AGAIN_SECONDS)

    def _give_up(self, attempt: _Attempt, why: str) -> None:
        if attempt.new is not None:
            self._coordinator.lose(attempt.new, why)
            attempt.new = None
        self._forget_token(attempt)
        attempt.token = ""

    def _forget_token(self, attempt: _Attempt) -> None:
        if attempt.token_file is not None:
            with contextlib.suppress(OSError):
                attempt.token_file.unlink()
        attempt.token_file = None
