"""What only building the user's own data and module can tell: the one thing that the front door cannot know without torch."""

from shoal.core.plan import Plan
from shoal.data.build import build_splits
from shoal.data.check import DataSummary
from shoal.parallel.rules import describe_facts
from shoal.trainer.build import build_parts
from shoal.trainer.config import Recipe
from shoal.trainer.laying import look_at


class OwnPartsHere:
    """Builds them in this process."""

    def measure_data(self, recipe: Recipe) -> DataSummary:
        """Build the data that a recipe names and count its samples."""
        splits = build_splits(recipe.data, recipe.train.seed)
        return DataSummary(
            spec=splits.spec,
            train=len(splits.train),
            validation=len(splits.validation),
            test=len(splits.test),
            description="your own data",
        )

    def check_plan(self, recipe: Recipe, plan: Plan) -> None:
        """Build the module, look at what it is made of, and refuse a plan that does not fit it.

        Raises:
            RequestError: lists every problem, and the nearest plan that works.
        """
        model, _, data = build_parts(recipe)
        plan.check(describe_facts(look_at(model, data, recipe.parallel), model))
