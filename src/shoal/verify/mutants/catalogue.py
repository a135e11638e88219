"""Planted bugs: a checker that cannot fail proves nothing. Each must be caught by the comparison that should see it.

A mutant is a plan, what the recipe must have for the bug to show, and a bug (``planted_bugs.py``) that breaks the real path
inside the rank processes. The same plan without the bug is its control and must pass.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from shoal.comm.world import World
from shoal.core.config import apply_overrides, validate
from shoal.trainer.config import Recipe
from shoal.verify.mutants import island_bugs, server_bugs
from shoal.verify.mutants import planted_bugs as bugs
from shoal.verify.mutants.compression_bugs import COMPRESSED
from shoal.verify.mutants.mutant import Death, Mutant

_GPT = {"name": "gpt", "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "dropout": 0.1}
_TEXT = {"source": "stdlib", "sequence": 16, "limit_bytes": 200_000}
# Lengths vary, so replicas carry different weights.
_RAGGED_MODEL = {"name": "seq2seq", "layers": 1, "hidden": 16, "heads": 2, "dropout": 0.1}
_RAGGED = {"source": "synthetic", "kind": "reverse", "samples": 64}
_NORMED_MODEL = {"name": "mlp", "layers": 2, "hidden": 16, "dropout": 0.1, "batch_norm": True}
_CLASSES = {"source": "synthetic", "kind": "classes", "samples": 128}
_CONTRASTIVE = "shoal.verify.mutants.contrastive"
_TOWERS = {"build": f"{_CONTRASTIVE}:build", "loss": f"{_CONTRASTIVE}:loss"}
_ODD_VOCABULARY = {"source": "synthetic", "kind": "tokens", "samples": 256, "sequence": 16, "vocab": 63}


_LONGER = ("train.steps=24",)
"""Two rounds of islands."""
PREDICTION = "prediction"
"""What catches a bug that changes no number: the plan costs something that it should not."""


_ALL: Sequence[Mutant] = (
    Mutant("all-reduce dropped", "dp=2", "grad", bugs.drop_all_reduce),
    Mutant(
        "gradients averaged where shares add up",
        "dp=2",
        "grad",
        bugs.average_over_replicas,
        reported="torchtitan 2318, DeepSpeed 966",
    ),
    Mutant("gradient scaled by tp", "dp=1 tp=2", "grad", bugs.scale_summed_gradients(2.0), reported="pytorch 160285"),
    Mutant(
        "gradient scaled by cp", "dp=1 cp=2", "grad", bugs.scale_buckets_by_size, reported="Megatron-LM 673, 906, 3943"
    ),
    Mutant(
        "gradient scaled by accumulation",
        "dp=2 microbatches=2",
        "grad",
        bugs.scale_summed_gradients(2.0),
        reported="DeepSpeed 7773",
    ),
    Mutant(
        "norm over one shard only",
        "dp=2 zero=1",
        "norm",
        bugs.norm_of_own_shard,
        overrides=("optim.clip=0.1",),
        reported="Megatron-LM PR 7530",
    ),
    Mutant(
        "norm weight not reduced under sequence parallelism",
        "dp=1 tp=2 sp=true",
        "grad",
        bugs.keep_partial_gradients,
        reported="Megatron-LM 1446",
    ),
    Mutant(
        "padded vocabulary in the loss",
        "dp=1 tp=2",
        "loss",
        bugs.count_padding,
        model=_GPT,
        data=_ODD_VOCABULARY,
        reported="Megatron-LM 1754",
    ),
    Mutant(
        "wrong causal mask at a ring boundary",
        "dp=1 cp=2",
        "loss",
        bugs.look_ahead_in_ring,
        reported="Megatron-LM 1464",
    ),
    Mutant("positions from zero on every context rank", "dp=1 cp=2", "loss", bugs.forget_positions),
    Mutant(
        "key-value gradient of one query head only",
        "dp=1 cp=2",
        "grad",
        bugs.drop_grouped_heads,
        overrides=("model.heads=4", "model.kv_heads=2"),
        reported="Megatron-LM 1464",
    ),
    Mutant("dropout mask depends on the rank", "dp=2", "loss", bugs.drop_by_rank, overrides=("model.dropout=0.1",)),
    Mutant(
        "recompute draws another dropout mask",
        "dp=1 recompute=full",
        "grad",
        bugs.redraw_in_recompute,
        overrides=("model.dropout=0.1",),
    ),
    Mutant("optimizer state of the wrong shard", "dp=2 zero=1", "optimizer", bugs.swap_optimizer_shards),
    Mutant(
        "loss averaged over unequal batches",
        "dp=2",
        "loss",
        bugs.average_unequal_batches,
        model=_RAGGED_MODEL,
        data=_RAGGED,
    ),
    Mutant(
        "batch norm statistics not synchronised",
        "dp=2",
        "buffer",
        bugs.keep_own_statistics,
        model=_NORMED_MODEL,
        data=_CLASSES,
    ),
    Mutant("tied weight reduced once only", "dp=1 tp=2", "grad", bugs.lose_tied_use, overrides=("model.tied=true",)),
    Mutant(
        "stale scale: clipped by the norm of the step before",
        "dp=2",
        "optimizer",
        bugs.clip_by_stale_norm,
        overrides=("optim.clip=0.1",),
    ),
    # The norm takes off whatever the bias before it adds.
    Mutant(
        "a weight that has no gradient but noise is updated by more than noise",
        "dp=2",
        "optimizer",
        bugs.update_by_noise_and_more,
        precision="float64",
        overrides=("train.batch_norm=sync",),
        model=_NORMED_MODEL,
        data=_CLASSES,
    ),
    Mutant(
        "a weight that has no gradient but noise goes a whole step",
        "dp=2",
        "weight",
        bugs.update_further_than_noise,
        precision="float64",
        overrides=("train.batch_norm=sync", "optim.name=adamw", "optim.lr=1e-3"),
        model=_NORMED_MODEL,
        data=_CLASSES,
    ),
    Mutant(
        "gradient of gathered rows scaled by the replicas",
        "dp=2",
        "grad",
        bugs.scale_gathered_rows,
        model=_TOWERS,
        data=_CLASSES,
    ),
    Mutant(
        "gradient of gathered rows from the other replicas dropped",
        "dp=2",
        "grad",
        bugs.keep_own_gathered_gradient,
        model=_TOWERS,
        data=_CLASSES,
    ),
    Mutant("updated weights not published", "dp=2 zero=1", "loss", bugs.keep_old_weights),
    Mutant("every replica reads the same samples", "dp=2", "loss", bugs.repeat_data),
    Mutant(
        "a stage uses a version that is one too old",
        "dp=1 pp=2 schedule=pipedream microbatches=4",
        "loss or grad",
        bugs.use_older_version,
    ),
    Mutant(
        "weights not stashed: the backward pass meets newer ones",
        "dp=1 pp=2 schedule=pipedream microbatches=4",
        "loss or grad",
        bugs.miss_stash,
    ),
    Mutant(
        "one version on all stages, but for the last",
        "dp=1 pp=2 schedule=pipedream-vsync microbatches=4",
        "loss or grad",
        bugs.use_newest_on_last_stage,
    ),
    Mutant("a stage swaps two microbatches", "dp=1 pp=2 schedule=1f1b microbatches=4", "loss", bugs.swap_microbatches),
    Mutant(
        "tied weight not summed over its stages",
        "dp=1 pp=2 schedule=1f1b microbatches=4",
        "grad",
        bugs.keep_own_tied_sum,
        overrides=("model.tied=true",),
    ),
    Mutant(
        "both directions of a weight not summed",
        "dp=1 pp=2 schedule=chimera microbatches=4",
        "grad",
        bugs.keep_own_tied_sum,
    ),
    Mutant(
        "ranks of a replicated stage not summed",
        "dp=1 pp=3 schedule=1f1b replicas=2-1 microbatches=4",
        "grad",
        bugs.keep_own_tied_sum,
    ),
    Mutant(
        "norm of one stage only",
        "dp=1 pp=2 schedule=1f1b microbatches=4",
        "norm",
        bugs.norm_of_own_shard,
        overrides=("optim.clip=0.1",),
    ),
    Mutant(
        "stale norm in a pipeline: clipped by that of the step before",
        "dp=1 pp=2 schedule=zb-h1 microbatches=4",
        "optimizer",
        bugs.clip_by_stale_norm,
        overrides=("optim.clip=0.1",),
    ),
    Mutant(
        "weight gradients of a split backward pass lost",
        "dp=1 pp=2 schedule=zb-h1 microbatches=4",
        "grad",
        bugs.lose_deferred_gradient,
    ),
    Mutant("a redundant collective", "dp=2 zero=1", PREDICTION, bugs.sum_once_more),
    Mutant("a push applied twice", "ps=1 workers=2 update=bsp", "grad", server_bugs.apply_twice),
    Mutant("a worker's share dropped", "ps=1 workers=2 update=bsp", "grad", server_bugs.drop_share),
    Mutant(
        "gradient scaled by the number of workers", "ps=1 workers=2 update=bsp", "grad", server_bugs.scale_by_workers(2)
    ),
    Mutant(
        "a server uses the learning rate of another update",
        "ps=1 workers=2 update=bsp",
        "weight",
        server_bugs.use_next_rate,
        overrides=("optim.schedule=linear",),
    ),
    Mutant(
        "a server adds in the order of arrival",
        "ps=1 workers=3 update=bsp",
        "grad",
        server_bugs.add_in_other_order,
        overrides=("train.global_batch=12",),
    ),
    Mutant(
        "old weights read under a new version",
        "ps=2 workers=2 update=ssp:1",
        "loss or grad",
        server_bugs.keep_first_weights,
    ),
    Mutant("a read that ignores the bound", "ps=2 workers=2 update=ssp:1", "rule", server_bugs.ignore_bound),
    Mutant(
        "a late gradient not weighted",
        "ps=1 workers=3 update=half:2,0.25",
        "rule",
        server_bugs.forget_lateness(late_rank=3),
        overrides=("train.global_batch=12",),
    ),
    Mutant(
        "backup promoted with an old version",
        "ps=2 workers=2 update=bsp backup=1",
        "loss or grad or weight",
        server_bugs.promote_old_weights,
        deaths=(Death("server-0", 1),),
    ),
    Mutant(
        "a rank's part of a group's gradient left behind",
        "ps=1 workers=2 tp=2 update=bsp",
        "grad",
        server_bugs.leave_part_behind,
    ),
    Mutant(
        "a rank of a group computes with old weights",
        "ps=1 workers=2 pp=2 microbatches=2 update=bsp",
        "loss",
        server_bugs.keep_part_of_weights,
    ),
    Mutant(
        "changes of islands summed and not averaged",
        "dp=2 sync=local:3",
        "weight",
        island_bugs.sum_changes,
        overrides=_LONGER,
    ),
    Mutant(
        "last tensor of a round not exchanged",
        "dp=2 sync=diloco:3",
        "weight",
        island_bugs.leave_out_last,
        overrides=_LONGER,
        reported="torchft, bucketed all-reduce",
    ),
    Mutant(
        "heavy ball under the name of Nesterov",
        "dp=2 sync=diloco:3",
        "weight",
        island_bugs.push_heavy_ball,
        overrides=_LONGER,
    ),
    Mutant(
        "outer gradient of the wrong sign",
        "dp=2 sync=diloco:3",
        "weight",
        island_bugs.turn_change_round,
        overrides=_LONGER,
        reported="torchft 233",
    ),
    Mutant(
        "agreed weights are the live ones", "dp=2 sync=diloco:3", "weight", island_bugs.keep_alias, overrides=_LONGER
    ),
    Mutant(
        "fragment applied one step late", "dp=2 sync=stream:4,2,1", "weight", island_bugs.apply_late, overrides=_LONGER
    ),
    Mutant(
        "fragment applied before it has arrived",
        "dp=2 sync=stream:4,2,1",
        "weight",
        island_bugs.apply_unarrived,
        overrides=_LONGER,
        reported="torchft, a round that commits although a sum in flight failed",
    ),
    Mutant(
        "outer momentum averaged twice", "dp=2 sync=diloco:3", "weight", island_bugs.average_twice, overrides=_LONGER
    ),
    Mutant(
        "push-sum weight forgotten",
        "dp=3 sync=pushsum:random",
        "weight",
        island_bugs.forget_weight,
        overrides=(*_LONGER, "train.global_batch=12"),
    ),
    Mutant(
        "stale neighbour list", "dp=4 sync=gossip:exponential", "weight", island_bugs.keep_neighbours, overrides=_LONGER
    ),
    Mutant(
        "an island's loss divided by the samples of all",
        "dp=2 sync=local:3",
        "loss",
        island_bugs.count_all_samples,
        overrides=_LONGER,
    ),
    *COMPRESSED,
)
MUTANTS: dict[str, Mutant] = {mutant.name: mutant for mutant in _ALL}
"""By name."""


def own_recipe(mutant: Mutant) -> Recipe:
    """A small recipe in which the bug shows."""
    tables: dict[str, Any] = {
        "model": dict(mutant.model or _GPT),
        "data": dict(mutant.data or _TEXT),
        "train": {"steps": 8, "global_batch": 8, "seed": 3},
        "optim": {"name": "adamw", "lr": 3e-3},
    }
    return validate(Recipe, apply_overrides(tables, mutant.overrides), origin=f"mutant {mutant.name!r}")


def with_overrides(recipe: Recipe, mutant: Mutant) -> Recipe:
    """The user's recipe with what the bug needs."""
    # What is unset stays unset: the plan is the mutant's, and a microbatch size could contradict it.
    tables = recipe.model_dump(mode="json", exclude_none=True)
    tables["train"].pop("micro_batch", None)
    return validate(Recipe, apply_overrides(tables, mutant.overrides), origin=f"mutant {mutant.name!r}")


@contextmanager
def planted(mutant: Mutant | None, world: World) -> Iterator[None]:
    """Break the real path of this process while the context lasts."""
    swaps = mutant.bug(world) if mutant is not None else []
    before: list[tuple[Any, str, Any]] = []
    try:
        for owner, name, value in swaps:
            before.append((owner, name, vars(owner)[name]))
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)
