"""What the ``[replicas]`` section asks for and a policy cannot do, found before a process starts. No torch."""

from collections.abc import Iterator

from shoal.core.syncrule import SyncRule
from shoal.replicas.config import ReplicaConfig

_WEIGHED = ("local", "diloco", "slowmo", "stream")
"""Policies that take the mean of the islands' changes."""
_READ_BY: dict[str, tuple[str, ...]] = {
    "outer_lr": ("diloco", "stream"),
    "outer_momentum": ("diloco", "stream"),
    "mixing": ("stream",),
    "slow_lr": ("slowmo",),
    "slow_momentum": ("slowmo",),
    "gossip_rate": ("gossip",),
    "pull": ("easgd",),
    "sparse_decay": ("sparse",),
    "sparse_bits": ("sparse",),
    "interval_scale": ("local",),
}
"""The policies that look at a setting; all of them look at those that are not here."""


def idle_replica_settings(config: ReplicaConfig, rule: SyncRule, *, is_compressed: bool) -> list[str]:
    """Settings that differ from their defaults and that this rule does not look at."""
    # By value: a run's own recipe.toml has every key filled in.
    changed = [name for name, field in type(config).model_fields.items() if getattr(config, name) != field.default]
    return [
        name
        for name in changed
        if not rule.is_island_rule
        or rule.kind not in _READ_BY.get(name, (rule.kind,))
        or (name == "interval_scale" and config.interval != "qsr")
        or (name == "gossip_rate" and not is_compressed)
    ]


def replica_problems(config: ReplicaConfig, rule: SyncRule, *, evaluate_every: int, leaves_out: bool) -> Iterator[str]:
    """Settings that the rule between islands cannot carry out, each with its fix.

    Args:
        config: the recipe's section.
        rule: of the plan.
        evaluate_every: the recipe's ``eval.every``.
        leaves_out: steps that are not finite are left out (``train.nonfinite = "skip"``).
    """
    if config.interval != "fixed" and (rule.kind != "local" or rule.seconds is not None):
        yield (
            f"replicas.interval {config.interval} lengthens or shortens the rounds of sync=local:H, and here sync={rule}; use "
            f"sync=local:{rule.period}, or leave interval out"
        )
    elif config.interval == "adacomm" and evaluate_every == 0:
        yield (
            "replicas.interval adacomm follows the validation loss, and eval.every is 0: there would be none; set eval.every"
        )
    if config.weigh == "samples" and rule.kind not in _WEIGHED:
        yield (
            f"replicas.weigh samples is for the mean of {', '.join(_WEIGHED)}, and sync={rule} takes none of all islands; leave "
            f"weigh out, or use one of these"
        )
    if leaves_out and rule.graph is not None:
        yield (
            f"train.nonfinite skip leaves an island out of a round by a flag that all islands hear, and with sync={rule} an "
            f"island hears its neighbours only; leave nonfinite out, or use sync=local:{rule.period}"
        )
