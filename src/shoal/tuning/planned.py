"""The model that is planned for, or simulated: a recipe's module as accelerators run it, or the shape that stands in its place.

Both as a chain of layers to be priced, and as the facts that say which plans it allows.
"""

from shoal.core.errors import RequestError
from shoal.core.facts import ModelFacts, Width
from shoal.core.plan import Plan
from shoal.costs.layers import ModelCosts
from shoal.costs.transformer import TransformerShape, transformer_chain
from shoal.data.spec import DataSpec
from shoal.models.check import facts_of
from shoal.planner.config import ShapeConfig
from shoal.planner.stacks import Software, find_software
from shoal.trainer.config import Recipe
from shoal.tuning.chain import chain_of, facts_by_looking


def facts_for(recipe: Recipe, spec: DataSpec | None) -> ModelFacts:
    """What plans must know of a recipe's model: by its shape, its config, or by looking at the user's own module.

    Args:
        recipe: the recipe.
        spec: of its data; a shape does not ask for it.
    """
    if recipe.planner.shape is not None:
        return shape_facts(recipe.planner.shape)
    assert spec is not None, "a module is built for its data"
    return facts_of(recipe.model, spec) or facts_by_looking(recipe, spec)


def chain_for(recipe: Recipe, spec: DataSpec | None) -> ModelCosts:
    """The model to plan for: the recipe's module as accelerators run it, or the shape that stands in its place.

    Args:
        recipe: the recipe.
        spec: of its data; a shape does not ask for it.

    Raises:
        RequestError: the module cannot be traced.
    """
    if recipe.planner.shape is not None:
        return shape_chain(recipe.planner.shape, recipe.train.precision, find_software(recipe.planner.software))
    assert spec is not None, "a module is built for its data"
    return chain_of(recipe, spec, device="cuda")


def shape_chain(shape: ShapeConfig, precision: str, software: Software) -> ModelCosts:
    """A transformer by its numbers, in a recipe's precision, with a software's kernels.

    Raises:
        RequestError: heads do not divide what they share out.
    """
    if shape.hidden % shape.heads and shape.head_size is None and not shape.kv_rank:
        raise RequestError(
            f"planner.shape: {shape.heads} heads do not divide hidden {shape.hidden}; give a number of heads that does, or "
            f"head_size"
        )
    item_bytes = {"float64": 8, "float32": 4}.get(precision, 2)
    return transformer_chain(
        TransformerShape(
            layers=shape.layers,
            hidden=shape.hidden,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            ffn=shape.ffn,
            vocab=shape.vocab,
            sequence=shape.sequence,
            is_gated=shape.gated,
            tied=shape.tied,
            dropout=False,
            fused_attention=software.fused_attention,
            fused_loss=software.fused_loss,
            fused_pointwise=software.fused_pointwise,
            experts=shape.experts,
            chosen_experts=shape.chosen_experts,
            expert_ffn=shape.expert_ffn,
            shared_ffn=shape.shared_ffn,
            dense_layers=shape.dense_layers,
            head_size=shape.head_size,
            query_rank=shape.query_rank,
            kv_rank=shape.kv_rank,
            item_bytes=item_bytes,
            learned_positions=not shape.gated,
        ),
        name=f"a transformer of {shape.layers} x {shape.hidden}",
    )


def shape_facts(shape: ShapeConfig) -> ModelFacts:
    """What plans must know of a transformer by its numbers."""
    return ModelFacts(
        name="the shape",
        num_blocks=shape.layers,
        num_pairs=2 * shape.layers,
        widths=(Width(name="ffn", size=shape.ffn or 4 * shape.hidden),),
        heads=((shape.heads, shape.kv_heads or shape.heads),),
        has_attention=True,
        sequence=shape.sequence,
        has_sequence=True,
        num_units=shape.layers,
    )


def check_experts(plan: Plan, chain: ModelCosts) -> None:
    """Refuse expert parallelism that a model's experts, or the plan's replicas, cannot be shared out over.

    Raises:
        RequestError: one message with both numbers and the fix.
    """
    if plan.ep == 1:
        return
    if chain.experts == 1:
        raise RequestError(
            f"plan {str(plan)!r}: ep={plan.ep} shares out experts, and {chain.name} has none; leave ep out, or say "
            f"planner.shape.experts"
        )
    if chain.experts % plan.ep:
        raise RequestError(
            f"plan {str(plan)!r}: ep={plan.ep} does not divide the {chain.experts} experts; set ep to one of their divisors"
        )
    if (plan.dp or 1) % plan.ep:
        raise RequestError(
            f"plan {str(plan)!r}: ep={plan.ep} ranks are taken from the dp={plan.dp or 1} replicas, and do not divide them; "
            f"change one of them"
        )
