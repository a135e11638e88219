"""Several hosts, before a run is started on them: versions, clocks, and the way between every two of them.

One agent is started on each host, as for a run; each listens for a moment, and each tries every other, one after the other so
that no measurement is of two. A pair that cannot be reached, or is far slower than the others, is named.
"""

import secrets
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.core.clock import Deadline
from shoal.core.errors import RequestError, RunError
from shoal.core.units import format_bytes
from shoal.doctor.checks import Check, judge
from shoal.launch.hosts.admission import choose_addresses, same_machine_problems, version_problems
from shoal.launch.hosts.coordinator import Coordinator, Fleet
from shoal.launch.hosts.messages import Hello, Interface, Listen, Listening, Ping, Probe, Probed
from shoal.launch.supervisor import SignalInbox

CLOCK_SECONDS = 1.0
"""Clocks that are further apart make events of several hosts hard to read together."""
SLOW_FACTOR = 3.0
"""A pair that sends so many times slower than the best, or takes so many times longer than the median, is wrong."""
_LEAST_TRIP = 0.002
"""Below this a round trip is never slow: it is the load of a host that is measured."""
_LEASE_SECONDS, _PROBE_SECONDS = 60.0, 15.0
_PINGS = 5


def examine_hosts(fleet: Fleet) -> list[Check]:
    """Check hosts and every pair of them.

    Raises:
        RequestError: the remote shell cannot be started.
        RunError: an agent fell silent while it was asked.
    """
    with SignalInbox() as inbox:
        coordinator = Coordinator(fleet, inbox, lease_seconds=_LEASE_SECONDS, show=lambda text: None)
        try:
            return _examine(coordinator, fleet)
        finally:
            coordinator.close()


def _examine(coordinator: Coordinator, fleet: Fleet) -> list[Check]:
    problems = coordinator.reach()
    checks = [
        judge(f"host {one.name}", _describe(one.hello), values={}, wrong=problems.get(one.name, ""))
        for one in coordinator.connections
    ]
    hellos = {one.name: one.hello for one in coordinator.connections if one.hello is not None}
    if len(hellos) < 2:
        return checks
    wrong = version_problems(hellos) + same_machine_problems(hellos, list(hellos))
    checks.append(judge("versions", f"of {len(hellos)} hosts", values={}, wrong="; ".join(wrong)))
    checks += _clocks(coordinator, list(hellos))
    try:
        interfaces = choose_addresses(hellos, network=fleet.network)
    except RequestError as error:
        return [*checks, judge("interfaces", "not found", values={}, wrong=str(error))]
    return [*checks, *judge_pairs(_probe_pairs(coordinator, interfaces), interfaces)]


def _describe(hello: Hello | None) -> str:
    if hello is None:
        return "no agent"
    return f"{hello.hostname}: Shoal {hello.shoal}, torch {hello.torch}, Python {hello.python}, {hello.cores} core(s)"


def _clocks(coordinator: Coordinator, hosts: Sequence[str]) -> list[Check]:
    lines = {one.name: one for one in coordinator.connections}
    for _ in range(_PINGS):
        for host in hosts:
            lines[host].send(Ping(sent=time.monotonic()))
        limit = Deadline(seconds=0.1)
        while not limit.is_over:
            coordinator.turn(0.02)
    offsets = {host: lines[host].clock_offset for host in hosts}
    middle = statistics.median(offsets.values())
    far = [
        f"{host} is {offset - middle:+.2f} s off"
        for host, offset in offsets.items()
        if abs(offset - middle) > CLOCK_SECONDS
    ]
    spread = max(offsets.values()) - min(offsets.values())
    advice = f"{', '.join(far)}: let chrony or ntpd set the clocks" if far else ""
    return [judge("clocks", f"within {spread * 1000:.0f} ms", values={"offsets": offsets}, wrong=advice)]


def _probe_pairs(coordinator: Coordinator, interfaces: Mapping[str, Interface]) -> dict[tuple[str, str], Probed]:
    token = secrets.token_hex(16)
    lines = {one.name: one for one in coordinator.connections}
    seconds = _PROBE_SECONDS * (len(interfaces) ** 2 + 1)
    ports: dict[str, Listening] = {}
    for host, interface in interfaces.items():
        lines[host].send(Listen(address=interface.address, token=token, seconds=seconds))
        ports[host] = _await(coordinator, host, Listening)
    found: dict[tuple[str, str], Probed] = {}
    for host in interfaces:
        for other in interfaces:
            if host == other:
                continue
            if ports[other].problem:
                found[host, other] = Probed(problem=ports[other].problem)
                continue
            there = interfaces[other].address
            lines[host].send(Probe(address=there, port=ports[other].port, token=token, seconds=_PROBE_SECONDS / 3))
            found[host, other] = _await(coordinator, host, Probed)
    return found


def _await(coordinator: Coordinator, host: str, kind: type) -> Any:
    limit = Deadline(seconds=2 * _PROBE_SECONDS)
    while True:
        for connection, message in coordinator.turn(0.05):
            if connection.name == host and isinstance(message, kind):
                return message
        lost = next((one.lost for one in coordinator.connections if one.name == host), "")
        if lost:
            raise RunError(f"host {host}: {lost}")
        limit.check(f"host {host} to answer")


def judge_pairs(found: Mapping[tuple[str, str], Probed], interfaces: Mapping[str, Interface]) -> list[Check]:
    """What is wrong with which pair. Pure."""
    reached = [probed for probed in found.values() if not probed.problem]
    trips = statistics.median(probed.round_trip for probed in reached) if reached else 0.0
    best = max((probed.bytes_per_second for probed in reached), default=0.0)
    checks = []
    for (host, other), probed in found.items():
        name = f"{host} to {other}"
        values = {"round_trip_s": probed.round_trip, "bytes_per_s": probed.bytes_per_second}
        if probed.problem:
            where = interfaces[other].address
            advice = (
                f"{host} does not reach {other} at {where} ({probed.problem}): look for a firewall, or give --network"
            )
            checks.append(judge(name, "not reached", values=values, wrong=advice))
            continue
        wrong = ""
        if probed.bytes_per_second * SLOW_FACTOR < best:
            wrong = f"{host} sends to {other} {best / probed.bytes_per_second:.1f} times slower than the best pair"
        elif probed.round_trip > max(_LEAST_TRIP, SLOW_FACTOR * trips):
            wrong = f"a message from {host} to {other} takes {probed.round_trip / trips:.1f} times longer than the median pair's"
        text = f"{probed.round_trip * 1000:.2f} ms, {format_bytes(probed.bytes_per_second)}/s"
        checks.append(
            judge(
                name,
                text,
                values=values,
                wrong=f"{wrong}: look at the cable, the port and the load of both" if wrong else "",
            )
        )
    return checks
