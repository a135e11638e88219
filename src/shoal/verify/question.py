"""What is asked of a proof: the recipe that it is about, and one plan of it in one arithmetic."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from shoal.core.facts import ModelFacts
from shoal.core.plan import Plan
from shoal.data.source import Splits
from shoal.parallel.analysis.structure import ModuleAnalysis
from shoal.trainer.config import Recipe
from shoal.verify.case import Case, Tree
from shoal.verify.mutants import Death


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is proved: a recipe, and the numbers that follow from its model and data."""

    recipe: Recipe
    total_steps: int
    facts: ModelFacts
    """What plans ask of the model."""
    num_samples: int
    has_batch_norm: bool
    model: nn.Module
    """As one process builds it; looked at, never trained."""
    data: Splits
    analysis: ModuleAnalysis

    def joins_replicas(self, plan: Plan) -> bool:
        """True when the replicas of a plan are one batch to this model: batch norm that is synchronised splits its sums."""
        return self.recipe.train.batch_norm == "sync" and self.has_batch_norm and (plan.dp or 1) > 1


@dataclass(frozen=True, kw_only=True)
class Question:
    """One plan in one arithmetic, everything derived."""

    subject: Subject
    recipe: Recipe
    """The subject's, in this arithmetic and with the cut of this plan."""
    plan: Plan
    case: Case
    tree: Tree
    mutant: str | None = None
    """A bug to plant, by name."""
    deaths: Sequence[Death] = ()
    """Servers that are killed on the way."""
    started: float = field(default_factory=time.monotonic)
