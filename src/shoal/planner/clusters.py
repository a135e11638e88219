"""A cluster as it is written in ``--cluster``: devices by name, nodes, and the link between nodes if it is not the usual one."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from shoal.core.errors import RequestError, offer
from shoal.planner.config import DeviceConfig
from shoal.planner.hardware import Cluster, Tier, parse_cluster
from shoal.planner.machine import read_machine
from shoal.planner.measured import measured_cluster
from shoal.planner.presets import LINKS, build_cluster

_FILE = re.compile(r".*(/|\.json\b)")
"""A path, or a name that ends like a machine file's; no device has either."""
_SIZE = re.compile(r":[0-9]+(x[0-9]+)?$")


def read_cluster(text: str, own: Mapping[str, DeviceConfig] | None = None) -> Cluster:
    """The cluster that ``NAME:NODESxDEVICES`` says, or ``NAME:NODESxDEVICES@LINK`` with another link between its nodes.

    Args:
        text: a preset, a name of ``own`` or a machine file; nodes, devices of each, and a name of ``LINKS``.
        own: devices by the user's own numbers.

    Raises:
        RequestError: the text is something else, the device or the link is unknown, or the file is no machine file.
    """
    devices, at, name = _at_link(text)
    if at and not name.strip():
        raise RequestError(
            f"cluster {text!r} names no link after @; leave @ out for the usual one, or give one of {', '.join(LINKS)}"
        )
    cluster = _of_file(devices.strip()) if _FILE.match(devices) else build_cluster(devices, own)
    if not at:
        return cluster
    wanted = name.strip().lower()
    if wanted not in LINKS:
        raise RequestError(
            f"cluster {text!r}: there is no link {name.strip()!r}; {offer(wanted, LINKS)}there are {', '.join(LINKS)}"
        )
    # A port a device, but for processes of one machine.
    sharing = 1 if cluster.reached is None else cluster.tiers[0].devices
    if cluster.beyond is not None:
        # One node has nothing to join; the link counts where --devices makes more of it.
        return replace(cluster, beyond=_joined(cluster.beyond, wanted, sharing))
    return replace(cluster, tiers=(*cluster.tiers[:-1], _joined(cluster.tiers[-1], wanted, sharing)))


def _at_link(text: str) -> tuple[str, str, str]:
    """What is before @, @ if there is one, and the link; one in the folders of a path is none."""
    folder, slash, last = text.rpartition("/")
    devices, at, name = last.partition("@")
    return folder + slash + devices, at, name


def _of_file(text: str) -> Cluster:
    """``FILE``, ``FILE:PROCESSES`` or ``FILE:MACHINESxPROCESSES``."""
    path, _, size = text.rpartition(":") if _SIZE.search(text) else (text, "", "")
    # The machine need not be this one: that is what planning is for.
    try:
        machine = read_machine(Path(path), is_here=False)
    except RequestError as refusal:
        raise RequestError(
            f"cluster {text!r}: {refusal}; or name a device in place of a path, such as a100-80gb:16x8"
        ) from None
    if not size:
        return measured_cluster(machine, path=path)
    if 0 in (numbers := [int(part) for part in size.split("x")]):
        raise RequestError(f"cluster {text!r} has no process; write {path}:PROCESSES or {path}:MACHINESxPROCESSES")
    parts = parse_cluster(f"file:{'x'.join(map(str, numbers))}")
    return measured_cluster(machine, path=path, num_nodes=parts.num_nodes, num_processes=parts.devices_per_node)


def _joined(tier: Tier, name: str, sharing: int) -> Tier:
    link = LINKS[name]
    return Tier(
        name=name,
        devices=tier.devices,
        bandwidth=link.bandwidth / sharing,
        latency=link.latency,
        source=link.source,
        is_mesh=link.is_mesh,
    )
