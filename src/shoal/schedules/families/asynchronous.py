"""PipeDream's schedules: 1F1B without a flush. What sets them apart is when weights change and which version is used."""

from collections.abc import Iterator
from dataclasses import replace

from shoal.schedules.families.line import ONE_F_ONE_B
from shoal.schedules.family import Size
from shoal.schedules.schedule import Updates

_PIPEDREAM = "Narayanan et al., 2019, doi 10.1145/3341301.3359646"
_2BW = "Narayanan et al., 2021, arXiv 2006.09503"


def _few_microbatches(size: Size) -> Iterator[str]:
    if size.microbatches < size.ranks:
        yield (
            f"two versions are enough only when a step has as many microbatches as there are ranks, and {size.microbatches} are "
            f"fewer than {size.ranks}; set microbatches to {size.ranks} or more"
        )


PIPEDREAM = replace(
    ONE_F_ONE_B,
    name="pipedream",
    summary="an update per microbatch; its backward uses the weights of its forward (weight stashing)",
    source=_PIPEDREAM,
    # As many as there are microbatches between a rank and the end: each came in under another version.
    versions=lambda size, rank: min(size.microbatches, size.ranks - rank),
    takes_replicas=False,
    updates=Updates.STASHED,
)

PIPEDREAM_VSYNC = replace(
    ONE_F_ONE_B,
    name="pipedream-vsync",
    summary="an update per microbatch; a microbatch uses one version on all stages (vertical sync)",
    source=_PIPEDREAM,
    # Later stages are ahead in updates and keep what they have overtaken, until its microbatch has passed.
    versions=lambda size, rank: min(size.microbatches + 1, size.ranks),
    takes_replicas=False,
    updates=Updates.VERTICAL,
)

PIPEDREAM_2BW = replace(
    ONE_F_ONE_B,
    name="pipedream-2bw",
    summary="an update per step without a flush; double-buffered weights, gradients one version late",
    source=_2BW,
    versions=lambda size, rank: 2,
    problems=_few_microbatches,
    takes_replicas=False,
    updates=Updates.BUFFERED,
    accumulates=True,
)

PIPEDREAM_FLUSH = replace(
    ONE_F_ONE_B,
    name="pipedream-flush",
    summary="1f1b with a flush per step: one version, what one process computes",
    source=_2BW,
)
