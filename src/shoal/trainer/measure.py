"""The size of the user's own data, found by building it: the one thing that the front door cannot know without torch."""

from shoal.data.build import build_splits
from shoal.data.check import DataSummary
from shoal.trainer.config import Recipe


def measure_own(recipe: Recipe) -> DataSummary:
    """Build the data that a recipe names and count its samples."""
    splits = build_splits(recipe.data, recipe.train.seed)
    return DataSummary(
        spec=splits.spec,
        train=len(splits.train),
        validation=len(splits.validation),
        test=len(splits.test),
        description="your own data",
    )
