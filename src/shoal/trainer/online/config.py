"""The ``[publish]`` section of a recipe: when a run publishes its model, and what a refresh must be worth."""

from collections.abc import Iterator

from pydantic import Field, model_validator

from shoal.core.config import Config
from shoal.core.errors import RequestError
from shoal.core.pipelines import schedule_facts
from shoal.core.plan import Plan

NEVER = 10**9
"""Steps of a run that nobody has given an end."""
DEFAULT_MINUTES = 5.0
"""Between refreshes of a run that was started with ``--follow`` and does not say it."""


class PublishConfig(Config):
    """When the model is published for ``shoal serve``, and when it is not."""

    every_steps: int | None = Field(default=None, ge=1)
    """Steps between refreshes; give one of every_steps and every_minutes, or neither to publish nothing."""
    every_minutes: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Minutes between refreshes, by the clock of the first rank, in place of steps."""
    keep: int = Field(default=3, ge=2)
    """How many of the newest versions stay, so that whoever reads one can finish."""
    holdback: int = Field(default=256, ge=1)
    """Samples of the validation split that a refresh is judged by, its newest (last) ones; all where it has fewer."""
    bound: float = Field(default=1.1, ge=1, allow_inf_nan=False)
    """A refresh is published while its loss on them is at most this many times the last published one's."""
    window: int = Field(default=1024, ge=64)
    """Training samples, of those that the first rank reads, in each of the two windows that drift is measured between."""

    @model_validator(mode="after")
    def _one_clock(self) -> "PublishConfig":
        if self.every_steps is not None and self.every_minutes is not None:
            raise ValueError(
                f"every_steps {self.every_steps} and every_minutes {self.every_minutes:g} both say when to publish; leave one out"
            )
        return self

    @property
    def is_on(self) -> bool:
        """Something is published."""
        return self.every_steps is not None or self.every_minutes is not None


def check_publish(config: PublishConfig, plan: Plan, *, num_validation: int | None, saves_every: int) -> None:
    """Refuse what cannot publish. ``saves_every`` is ``checkpoint.every``.

    Raises:
        RequestError: lists why, each with the fix.
    """
    found = list(_problems(config, plan, num_validation, saves_every)) if config.is_on else []
    if found:
        raise RequestError("\n".join(found))


def _problems(config: PublishConfig, plan: Plan, num_validation: int | None, saves_every: int) -> Iterator[str]:
    if plan.ps:
        if not saves_every:
            yield (
                f"plan {str(plan)!r}: with parameter servers it is checkpoints that are published, and checkpoint.every is 0; "
                "set it, to publish.every_steps or less"
            )
    elif config.every_minutes is not None and plan.pp > 1 and schedule_facts(plan.schedule).is_asynchronous:
        yield (
            f"publish.every_minutes {config.every_minutes:g}: stages of schedule={plan.schedule} are at different steps at any "
            "minute; set publish.every_steps"
        )
    if num_validation == 0:
        yield (
            "publish holds a refresh to its loss on the newest validation samples, and the validation split has 0; set "
            "data.validation, such as 0.1"
        )
