"""What one process must know of a pipeline to add up as it does: which stages use a weight, in which directions and
on how many ranks.

The reference imports nothing of ``pipeline/``; it is told in names and numbers, found here beforehand.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from shoal.core.plan import Plan
from shoal.data.source import Splits
from shoal.parallel.analysis.structure import ModuleAnalysis
from shoal.pipeline.build import Stages, cut_chain
from shoal.pipeline.config import PipelineConfig
from shoal.trainer.staging import example_of, look_at_stages
from shoal.verify.case import Tree


@dataclass(frozen=True, kw_only=True)
class CutModel:
    """A plan's cut of a model, and who holds what under it."""

    stages: Stages
    holders: Mapping[str, frozenset[int]]
    """Stages by parameter name."""
    aliases: Mapping[str, Sequence[str]]
    """All names of each parameter."""
    paths: Mapping[str, frozenset[int]]
    """Stages by the path of a unit."""

    @property
    def places(self) -> list[str]:
        """Where the second and later stages begin, as a recipe says it."""
        return [self.stages.units[start].path for start in self.stages.starts[1:]]

    def tree(self, *, replicas: int, microbatches: int) -> Tree:
        """The order of sums."""
        schedule, count = self.stages.schedule, self.stages.schedule.grid.num_stages
        if schedule.updates.flows:
            held = [[name for name, stages in self.holders.items() if stage in stages] for stage in range(count)]
            return Tree(replicas=replicas, microbatches=microbatches, delay=schedule.name, stages=held)
        tied = {name: stages for name, stages in self.holders.items() if len(stages) > 1}
        uses = {name: [self._names_in(name, stage) for stage in sorted(stages)] for name, stages in tied.items()}
        turns: dict[str, list[int]] = {}
        for name, stages in self.holders.items():
            ranks = [schedule.grid.replicas[stage] for stage in sorted(stages)] if schedule.grid.replicas else []
            if max(ranks, default=1) > 1:
                turns[name] = ranks
        return Tree(
            replicas=replicas,
            microbatches=microbatches,
            directions=schedule.grid.directions,
            users={name: sorted(stages) for name, stages in tied.items()},
            uses=uses,
            # Without such weights the tree says nothing of the cut: one reference serves them all.
            places=self.places if tied else (),
            units=list(self.paths) if tied else (),
            turns=turns,
        )

    def _names_in(self, parameter: str, stage: int) -> list[str]:
        return [
            alias
            for alias in self.aliases[parameter]
            if any(alias.startswith(f"{path}.") and stage in stages for path, stages in self.paths.items())
        ]


def cut_model(
    model: nn.Module, data: Splits, analysis: ModuleAnalysis, plan: Plan, config: PipelineConfig, *, global_batch: int
) -> CutModel:
    """Look at how a plan cuts a model, which stays as it is.

    Raises:
        RequestError: it cannot be cut so.
    """
    stages = look_at_stages(model, data, analysis, plan=plan, config=config, global_batch=global_batch)
    own = copy.deepcopy(model)
    chain = cut_chain(own, example_of(data), stages)
    first = {id(parameter): name for name, parameter in own.named_parameters()}
    aliases: dict[str, list[str]] = {}
    for name, parameter in own.named_parameters(remove_duplicate=False):
        aliases.setdefault(first[id(parameter)], []).append(name)
    paths = {unit.path: chain.stages_of(unit.path) for unit in stages.units}
    return CutModel(stages=stages, holders=chain.holders(), aliases=aliases, paths=paths)
