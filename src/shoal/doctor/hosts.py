"""Several hosts, before a run is started on them: versions, clocks, and the way between every two of them.

One agent is started on each host, as for a run; each listens for a moment, and each tries every other, in rounds in which no host
has two, so that no measurement is of two. A pair that cannot be reached, or is far slower than the others, is named.
"""

import secrets
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from shoal.core.clock import Deadline
from shoal.core.errors import RequestError, RunError
from shoal.core.units import format_bytes
from shoal.doctor.checks import Check, judge
from shoal.launch.hosts.admission import choose_addresses, same_machine_problems, version_problems
from shoal.launch.hosts.clocks import wrong_clocks
from shoal.launch.hosts.coordinator import Coordinator, Fleet
from shoal.launch.hosts.messages import Hello, Interface, Listen, Listening, Probe, Probed
from shoal.launch.supervisor import SignalInbox

SLOW_FACTOR = 3.0
"""A pair that sends so many times slower than the best, or takes so many times longer than the median, is wrong."""
_LEAST_TRIP = 0.002
"""Below this a round trip is never slow: it is the load of a host that is measured."""
_LEASE_SECONDS, _PROBE_SECONDS = 60.0, 15.0


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
    problems = coordinator.reach(awaits_all=True)
    checks = [
        judge(f"host {one.name}", _describe(one.hello), values={}, wrong=problems.get(one.name, ""))
        for one in coordinator.connections
    ]
    hellos = {one.name: one.hello for one in coordinator.connections if one.hello is not None}
    if len(hellos) < 2:
        return checks
    wrong = version_problems(hellos) + same_machine_problems(hellos, list(hellos))
    checks.append(judge("versions", f"of {len(hellos)} hosts", values={}, wrong="; ".join(wrong)))
    checks.append(_clocks(coordinator.measure_clocks()))
    try:
        interfaces = choose_addresses(hellos, network=fleet.network)
    except RequestError as error:
        return [*checks, judge("interfaces", "not found", values={}, wrong=str(error))]
    return [*checks, *judge_pairs(_probe_pairs(coordinator, interfaces), interfaces)]


def _describe(hello: Hello | None) -> str:
    if hello is None:
        return "no agent"
    return f"{hello.hostname}: Shoal {hello.shoal}, torch {hello.torch}, Python {hello.python}, {hello.cores} core(s)"


def _clocks(offsets: Mapping[str, float]) -> Check:
    spread = max(offsets.values(), default=0.0) - min(offsets.values(), default=0.0)
    found = f"within {spread * 1000:.0f} ms"
    return judge("clocks", found, values={"offsets": dict(offsets)}, wrong="; ".join(wrong_clocks(offsets)))


def _probe_pairs(coordinator: Coordinator, interfaces: Mapping[str, Interface]) -> dict[tuple[str, str], Probed]:
    token = secrets.token_hex(16)
    lines = {one.name: one for one in coordinator.connections}
    rounds = pair_rounds(list(interfaces))
    seconds = _PROBE_SECONDS * (len(rounds) + 1)
    for host, interface in interfaces.items():
        lines[host].send(Listen(address=interface.address, token=token, seconds=seconds))
    ports: dict[str, Listening] = _await(coordinator, interfaces, Listening)
    found: dict[tuple[str, str], Probed] = {}
    for pairs in rounds:
        asked = {}
        for host, other in pairs:
            if ports[other].problem:
                found[host, other] = Probed(problem=ports[other].problem)
                continue
            there, asked[host] = interfaces[other].address, other
            lines[host].send(Probe(address=there, port=ports[other].port, token=token, seconds=_PROBE_SECONDS / 3))
        answers: dict[str, Probed] = _await(coordinator, asked, Probed)
        found |= {(host, asked[host]): answer for host, answer in answers.items()}
    return {(host, other): found[host, other] for host in interfaces for other in interfaces if host != other}


def pair_rounds(hosts: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Every ordered pair of hosts once, in rounds in which no host has two: what is measured at once does not meet in a host.
    So n hosts take 2 (n - 1) rounds and not n (n - 1), or two more where n is odd. Pure."""
    table: list[str | None] = [*hosts, *([None] if len(hosts) % 2 else [])]
    half, rounds = len(table) // 2, []
    for _ in range(len(table) - 1):
        met = zip(table[:half], reversed(table[half:]), strict=True)
        pairs = [(one, other) for one, other in met if one is not None and other is not None]
        rounds += [pairs, [(other, one) for one, other in pairs]]
        # The first one stays, and the others move on by a place: so each meets each.
        table = [table[0], table[-1], *table[1:-1]]
    return [pairs for pairs in rounds if pairs]


def _await(coordinator: Coordinator, hosts: Collection[str], kind: type) -> dict[str, Any]:
    """What each of these hosts answers."""
    limit = Deadline(seconds=2 * _PROBE_SECONDS)
    found: dict[str, Any] = {}
    while missing := sorted(set(hosts) - found.keys()):
        for connection, message in coordinator.turn(0.05):
            if connection.name in missing and isinstance(message, kind):
                found[connection.name] = message
        for one in coordinator.connections:
            if one.name in missing and one.name not in found and one.lost:
                raise RunError(f"host {one.name}: {one.lost}")
        if set(hosts) - found.keys():
            limit.check(f"host {missing[0]} to answer")
    return found


def judge_pairs(found: Mapping[tuple[str, str], Probed], interfaces: Mapping[str, Interface]) -> list[Check]:
    """What is wrong with which pair, and with the host that is in all of them. Pure."""
    wrong = {pair: text for pair, probed in found.items() if (text := _wrong(pair, probed, found, interfaces))}
    culprits = [host for host in interfaces if _is_culprit(host, found, wrong)]
    checks = []
    for pair, probed in found.items():
        host, other = pair
        values = {"round_trip_s": probed.round_trip, "bytes_per_s": probed.bytes_per_second}
        text = f"{probed.round_trip * 1000:.2f} ms, {format_bytes(probed.bytes_per_second)}/s"
        advice = wrong.get(pair, "")
        if advice:
            blamed = next((name for name in culprits if name in pair), None)
            where = (
                "the cable, the port and the load of both"
                if blamed is None
                else (f"the cable, the port and the load of {blamed}: all its pairs are wrong, and the others are not")
            )
            advice = f"{advice}; look at {where}" if not probed.problem else advice
        checks.append(
            judge(f"{host} to {other}", "not reached" if probed.problem else text, values=values, wrong=advice)
        )
    return checks


def _is_culprit(host: str, found: Mapping[tuple[str, str], Probed], wrong: Mapping[tuple[str, str], str]) -> bool:
    """True where all pairs of a host are wrong and all others are right; of two hosts nobody could say."""
    own = [pair for pair in found if host in pair]
    rest = [pair for pair in found if host not in pair]
    return bool(rest) and all(pair in wrong for pair in own) and not any(pair in wrong for pair in rest)


def _wrong(
    pair: tuple[str, str],
    probed: Probed,
    found: Mapping[tuple[str, str], Probed],
    interfaces: Mapping[str, Interface],
) -> str:
    host, other = pair
    if probed.problem:
        where = interfaces[other].address
        return f"{host} does not reach {other} at {where} ({probed.problem}): look for a firewall, or give --network"
    reached = [one for one in found.values() if not one.problem]
    trips = statistics.median(one.round_trip for one in reached)
    best = max(one.bytes_per_second for one in reached)
    if probed.bytes_per_second * SLOW_FACTOR < best:
        return f"{host} sends to {other} {best / probed.bytes_per_second:.1f} times slower than the best pair"
    if probed.round_trip > max(_LEAST_TRIP, SLOW_FACTOR * trips):
        return f"a message from {host} to {other} takes {probed.round_trip / trips:.1f} times longer than the median pair's"
    return ""
