"""Who takes part in an elastic run: events of its processes and hosts go to the state machine of ``elastic/group.py``.

Supervisors (``launch/group/elastic.py`` of one host, ``launch/hosts/elastic.py`` of several) know processes, the state machine
knows replicas, hosts and leases; on one host there is no lease. No torch.
"""

import math
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal.core.events import StragglerFound
from shoal.core.plan import Plan
from shoal.elastic import group
from shoal.elastic.config import GroupConfig
from shoal.elastic.groupchanges import (
    Died,
    Ended,
    Event,
    Expel,
    Failed,
    GiveUp,
    Heard,
    HeardAgain,
    Instruction,
    Joined,
    Left,
    Order,
    Publish,
    Ready,
    Slow,
    Ticked,
)
from shoal.elastic.groupstate import State, Wanted
from shoal.launch.config import ProcessConfig
from shoal.launch.group import elastic as elasticgroup
from shoal.launch.group.control import Pace
from shoal.trainer.elastic.pacing import PaceWatch

_HOST = socket.gethostname()


@dataclass
class HostMembership:
    """Decides for the ranks of one host, or of several that are named; see ``GroupPolicy``."""

    state: State
    replica_size: int
    num_slots: int
    watch: PaceWatch
    starts_again: bool
    """Whether a replica may be started in the place of one that died."""
    _has_slots: bool = field(default=False, init=False)
    _paced_epoch: int = field(default=0, init=False)

    @property
    def num_replicas(self) -> int:
        """Replicas to begin with."""
        return self.state.wanted.at_start

    def joined(
        self, member: str, *, replica: str, position: int, spare: bool, host: str | None = None
    ) -> Sequence[elasticgroup.Action]:
        """See ``GroupPolicy``."""
        actions: list[elasticgroup.Action] = []
        if host is None and not self._has_slots:
            self._has_slots = True
            room = self.num_slots // self.replica_size if self.starts_again else 0
            actions += self._hear(Heard(host=_HOST, now=time.monotonic(), slots=room))
        return actions + self._hear(
            Joined(
                member=member,
                replica=replica,
                host=host or _HOST,
                position=position,
                spare=spare,
                now=time.monotonic(),
            )
        )

    def heard(self, host: str, *, agent: str, slots: int) -> Sequence[elasticgroup.Action]:
        """See ``GroupPolicy``."""
        room = slots // self.replica_size if self.starts_again else 0
        return self._hear(Heard(host=host, agent=agent, slots=room, now=time.monotonic()))

    def heard_again(self, agents: Mapping[str, str]) -> Sequence[elasticgroup.Action]:
        """See ``GroupPolicy``."""
        return self._hear(HeardAgain(agents=agents, now=time.monotonic()))

    def ready(self, member: str) -> Sequence[elasticgroup.Action]:
        """See ``GroupPolicy``."""
        return self._hear(Ready(member=member, now=time.monotonic()))

    def died(self, member: str, cause: str) -> Sequence[elasticgroup.Action]:
        """See ``GroupPolicy``."""
        return self._with_end(self._hear(Died(member=member, cause=cause, now=time.monotonic())))

    def left(self, member: str, reason: str) -> Sequence[elasticgroup.Action]:
        """See ``GroupPolicy``."""
        return self._with_end(self._hear(Left(member=member, reason=reason, now=time.monotonic())))

    def _with_end(self, actions: list[elasticgroup.Action]) -> list[elasticgroup.Action]:
        """With the end of the run where too few are left and nobody comes."""
        state = self.state
        left = sum(unit.is_ready(self.replica_size) for unit in state.units.values())
        if state.phase == "gathering" and state.epoch > 0 and not self.starts_again:
            wanted = state.wanted.min_dp
            reason = (
                f"{left} of {state.wanted.num_logical} replicas are left, and elastic.min_dp is {wanted}; lower it, or set "
                "elastic.rejoin or elastic.spares so that others take the place of the dead"
            )
            actions.append(elasticgroup.GiveUp(reason=reason))
        return actions

    def failed(self, member: str, epoch: int, suspects: Sequence[str] = ()) -> Sequence[elasticgroup.Action]:
        """See ``GroupPolicy``."""
        return self._hear(Failed(member=member, epoch=epoch, suspects=tuple(suspects), now=time.monotonic()))

    def paced(self, paces: Mapping[str, Pace]) -> Sequence[elasticgroup.Action]:
        """See ``GroupPolicy``."""
        view, actions = self.state.view, list[elasticgroup.Action]()
        if view is None or self.state.phase != "running":
            return actions
        if view.epoch != self._paced_epoch:
            self._paced_epoch = view.epoch
            self.watch.forget()
        now = time.monotonic()
        for one in self.watch.look(paces, view.members, now=now):
            host = next(replica.host for replica in view.replicas if one.rank in replica.members)
            event = StragglerFound(
                member=one.rank,
                host=host,
                factor=round(one.factor, 3),
                reason=one.reason,
                seconds=one.seconds,
                is_left_out=self.state.wanted.drops_slow,
            )
            actions.append(elasticgroup.Tell(text=f"a straggler on {host}: {one}", event=event))
            actions += self._hear(Slow(member=one.rank, reason=str(one), now=now))
        return actions

    def ticked(self) -> Sequence[elasticgroup.Action]:
        """See ``GroupPolicy``."""
        return self._hear(Ticked(now=time.monotonic()))

    def ended(self) -> Sequence[elasticgroup.Action]:
        """See ``GroupPolicy``."""
        return self._hear(Ended(now=time.monotonic()))

    def _hear(self, event: Event) -> list[elasticgroup.Action]:
        self.state, instructions = group.step(self.state, event)
        return [action for one in instructions if (action := _action(one)) is not None]


def build_membership(
    config: GroupConfig, process: ProcessConfig, plan: Plan, *, hosts: Sequence[str] = ()
) -> HostMembership:
    """What decides who takes part in a run: on this host, or on those that are named, which have a lease."""
    dp, size = plan.dp or 1, plan.ranks_per_replica
    limit = dp if config.max_dp is None else config.max_dp
    # To leave the only host out is to end the run: so many for each of its replicas.
    failures = config.max_failures * (1 if len(hosts) > 1 else limit + config.spares)
    wanted = Wanted(
        num_logical=dp,
        replica_size=size,
        min_dp=config.min_dp,
        max_dp=config.max_dp,
        spares=config.spares,
        scales=config.batch == "scale",
        drops_slow=config.drop_stragglers,
        # One host that cannot be reached by itself: there is nobody to tell of it.
        lease_seconds=process.lease_seconds if hosts else math.inf,
        join_seconds=process.start_deadline,
        max_failures=failures,
    )
    starts_again = config.starts_more
    return HostMembership(
        state=State(wanted=wanted),
        replica_size=size,
        num_slots=(limit + config.spares) * size,
        watch=PaceWatch(config.straggler_factor),
        starts_again=starts_again,
    )


def ranks_at_start(config: GroupConfig, plan: Plan) -> int:
    """How many processes are started: fewer than the plan has where ``elastic.max_dp`` is less than its ``dp``."""
    dp = plan.dp or 1
    return plan.world_size // dp * config.replicas_at_start(dp)


def _action(instruction: Instruction) -> elasticgroup.Action | None:
    if isinstance(instruction, Publish):
        view = instruction.view
        return elasticgroup.NewView(
            epoch=view.epoch,
            replicas=[replica.members for replica in view.replicas],
            num_logical=view.num_logical,
            cause=instruction.cause,
            is_retry=instruction.is_retry,
            hosts=[replica.host for replica in view.replicas],
        )
    if isinstance(instruction, Order):
        return elasticgroup.StartReplica(name=instruction.replica, spare=instruction.spare, host=instruction.host)
    if isinstance(instruction, Expel):
        return elasticgroup.EndMember(member=instruction.member, reason=instruction.reason)
    return elasticgroup.GiveUp(reason=instruction.reason) if isinstance(instruction, GiveUp) else None
