"""What all processes of a run must agree on: every setting of the recipe but those that concern a process alone, as plain text.

Compared at the door (``paramserver/door.py``). Processes on several machines each read a recipe of their own, and two that differ
in a seed or a rate would train together without a word.
"""

import json

from shoal.trainer.claim import flatten
from shoal.trainer.config import Recipe

_OWN = (
    "telemetry",
    "eval",
    "elastic",
    "train.threads",
    "data.prefetch",
    "data.workers",
    "paramserver.hang_after",
    "paramserver.hang_seconds",
)
"""Sections and keys that may differ from process to process."""


def shared_settings(recipe: Recipe) -> dict[str, str]:
    """The settings that must be the same everywhere, by key; the plan is among them."""
    return {
        key: json.dumps(value)
        for key, value in sorted(flatten(recipe.model_dump(mode="json")).items())
        if value is not None and not any(key == name or key.startswith(f"{name}.") for name in _OWN)
    }
