"""What only building the user's own data and module can tell: the one thing that the front door cannot know without torch."""

from pathlib import Path

from shoal.core.plan import Plan
from shoal.data.build import build_splits
from shoal.data.check import DataSummary
from shoal.data.config import AnyDataConfig
from shoal.data.source import Splits
from shoal.engine.parallelize import analyse, example_of, resolve_stages
from shoal.models.embeddings import make_dense
from shoal.optim.torchclass import check_named
from shoal.parallel.requirements import describe_facts
from shoal.pipeline.build import prove_stages
from shoal.trainer.build import build_parts
from shoal.trainer.config import Recipe
from shoal.trainer.meancheck import find_other_mean
from shoal.trainer.samedata import refuse_other_data_early
from shoal.trainer.trial import try_first_samples


class OwnPartsHere:
    """Builds them in this process: the data once, because that may take minutes, and a module anew for every question."""

    def __init__(self) -> None:
        self._built: tuple[AnyDataConfig, int, Splits] | None = None

    def _data(self, recipe: Recipe) -> Splits:
        config, seed = recipe.data, recipe.train.seed
        if self._built is None or self._built[:2] != (config, seed):
            self._built = config, seed, build_splits(config, seed)
        return self._built[2]

    def measure_data(self, recipe: Recipe) -> DataSummary:
        """Build the data that a recipe names and count its samples."""
        splits = self._data(recipe)
        return DataSummary(
            spec=splits.spec,
            train=len(splits.train),
            validation=len(splits.validation),
            test=len(splits.test),
            description="your own data",
        )

    def check_same_data(self, recipe: Recipe, checkpoints: Path) -> None:
        """Build the data, and compare it with what the newest checkpoint of a folder was trained on.

        Raises:
            RequestError: it is other data.
        """
        refuse_other_data_early(checkpoints, self._data(recipe))

    def check_optimizer(self, recipe: Recipe) -> None:
        """Try the class of torch that a recipe names.

        Raises:
            RequestError: with the nearest name, the arguments that it takes, or why it cannot be used.
        """
        check_named(recipe.optim)

    def check_plan(self, recipe: Recipe, plan: Plan) -> None:
        """Build the module, look at what it is made of, and refuse a plan that does not fit it.

        Raises:
            RequestError: lists every problem, and the nearest plan that works; or says why it cannot be cut into stages.
        """
        model, _, data = build_parts(recipe, data=self._data(recipe))
        make_dense(model)
        analysis = analyse(model, data, recipe.parallel)
        plan.check(describe_facts(analysis, model))
        if plan.pp > 1:
            stages = resolve_stages(model, data, analysis, plan=plan, settings=recipe.settings)
            prove_stages(model, example_of(data), stages)

    def try_parts(self, recipe: Recipe, plan: Plan) -> tuple[str, ...]:
        """Run the first samples through the user's own parts; what the user should know of them.

        Raises:
            RequestError: data, model and loss do not fit one another.
        """
        model, loss, data = build_parts(recipe, data=self._data(recipe))
        found = find_other_mean(model, loss, data.train, plan=plan, train=recipe.train)
        try_first_samples(recipe, plan, model, loss, data)
        return () if found is None else (found,)
