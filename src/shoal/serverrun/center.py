"""The process of a candidate for the center. No torch: it is started, and started again, in no time."""

import asyncio
import contextlib
import sys
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from shoal.comm.wire.node import Node
from shoal.core.events import ViewChanged
from shoal.core.rundir import RunDir
from shoal.elastic.election.etcd import EtcdLease
from shoal.elastic.election.filelease import FileLease
from shoal.elastic.election.voters import Sole, Voters
from shoal.elastic.membership import Wanted
from shoal.elastic.view import View
from shoal.paramserver.center.candidate import Candidate
from shoal.paramserver.center.center import Center
from shoal.paramserver.lbfgs.algorithm import LbfgsSettings
from shoal.paramserver.lbfgs.coordinator import BatchSettings, Coordinator
from shoal.serverrun.cluster import Cluster
from shoal.serverrun.process import ProcessSpec, open_node, run_process
from shoal.telemetry.eventlog import append_event

_LONELY_SECONDS = 600.0
"""How long a voter waits for any other: longer than a machine takes to start, and than most cuts of a network last."""


async def lead(spec: ProcessSpec) -> str:
    """Stand for election until the run has ended; why it was stopped, and nothing when it was finished."""
    return await (_lead_here(spec) if spec.cluster is None else _lead_cluster(spec, spec.cluster))


async def _lead_here(spec: ProcessSpec) -> str:
    node = open_node(spec)
    elector = FileLease(
        spec.lease_folder,
        name=spec.name,
        address=spec.address,
        lease_seconds=spec.recipe.paramserver.lease_seconds,
    )
    center = Center(
        node,
        elector,
        wanted=wanted_of(spec),
        tell=tell,
        settings=spec.settings,
        folder=spec.folder,
        on_view=partial(report_view, spec),
    )
    center.driver = build_coordinator(spec, node, center)
    await node.listen(spec.address, center.handle)
    try:
        return await center.run()
    finally:
        with contextlib.suppress(OSError):
            await elector.resign()
        await node.close()


async def _lead_cluster(spec: ProcessSpec, cluster: Cluster) -> str:
    node = open_node(spec)
    try:
        elector = _build_elector(spec, cluster, node)
        others = [address for index, address in enumerate(cluster.centers) if index != cluster.index]
        candidate = Candidate(
            node,
            elector,
            name=spec.name,
            others=others,
            wanted=wanted_of(spec),
            settings=spec.settings,
            lonely_seconds=max(_LONELY_SECONDS, cluster.search_seconds),
            tell=tell,
            on_view=partial(report_view, spec),
        )
        candidate.center.driver = build_coordinator(spec, node, candidate.center)
        tell(f"{spec.name} listens on {(await node.listen(spec.address, candidate.handle)).partition('#')[0]}")
        if not others and not cluster.etcd:
            tell(
                "it is the only candidate: there is no election, and nobody replaces it when it dies; three candidates would"
            )
        try:
            if isinstance(elector, Voters):
                await elector.start()
            return await candidate.run()
        finally:
            await (elector.close() if isinstance(elector, Voters) else elector.resign())
    finally:
        await node.close()


def _build_elector(spec: ProcessSpec, cluster: Cluster, node: Node) -> Voters | Sole | EtcdLease:
    ballot = ballot_file(spec.kept_dir, spec.name)
    own = cluster.centers[cluster.index]
    if cluster.etcd:
        return EtcdLease(
            cluster.etcd,
            key=urlsplit(cluster.etcd).path.strip("/"),
            name=spec.name,
            address=own,
            lease_seconds=spec.recipe.paramserver.lease_seconds,
            access=cluster.etcd_access,
        )
    if len(cluster.centers) == 1:
        return Sole(name=spec.name, address=own, ballot=ballot)
    return Voters(
        name=spec.name,
        address=own,
        voters=dict(zip(cluster.names, cluster.centers, strict=True)),
        ballot=ballot,
        lease_seconds=spec.recipe.paramserver.lease_seconds,
        seed=spec.recipe.train.seed,
        node=node,
    )


def report_view(spec: ProcessSpec, view: View, cause: str) -> None:
    """Write a view into the events of this center, where it has a run directory."""
    if spec.run_dir is not None:
        event = ViewChanged(
            epoch=view.epoch,
            replicas=len(view.workers),
            logical=spec.plan.workers or 1,
            members=[member.name for member in view],
            hosts=[],
            cause=cause,
        )
        append_event(RunDir(spec.run_dir).events(spec.rank), event, rank=spec.rank)


def ballot_file(run_dir: Path, name: str) -> Path:
    """Where a candidate keeps its vote."""
    return RunDir(run_dir).root / "ballots" / f"{name}.json"


def wanted_of(spec: ProcessSpec) -> Wanted:
    """What the run asked for, in the center's words."""
    config = spec.recipe.paramserver
    return Wanted(
        servers=spec.plan.ps,
        backups=spec.plan.backup,
        dead_seconds=config.dead_seconds,
        join_seconds=spec.recipe.elastic.start_deadline,
    )


def build_coordinator(spec: ProcessSpec, node: Node, center: Center) -> Coordinator | None:
    """Who drives the steps beside this center; None where workers make them by themselves."""
    if spec.rule.kind != "lbfgs":
        return None
    config = spec.recipe.paramserver
    return Coordinator(
        node,
        center,
        settings=LbfgsSettings(
            lr=config.lbfgs_lr,
            history=config.lbfgs_history,
            line_search=config.lbfgs_search,
            tolerance_gradient=config.lbfgs_tolerance,
        ),
        batches=BatchSettings(global_batch=spec.recipe.train.global_batch, workers=spec.plan.num_shares),
        deadline_seconds=config.deadline,
        tell=tell,
    )


def tell(line: str) -> None:
    """A line for people."""
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Entry point of a center of a job."""
    run_process(lambda role, spec: asyncio.run(_lead_to_the_end(spec)))


async def _lead_to_the_end(spec: ProcessSpec) -> None:
    await lead(spec)


if __name__ == "__main__":
    main()
