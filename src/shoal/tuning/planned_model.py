"""The model that is planned for, or simulated: a recipe's module as accelerators run it, or the shape that stands in its place.

Both as a chain of layers with their costs, and as the facts that say which plans it allows. Nothing is allocated, so a model that
no machine here could hold is described in seconds.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.errors import RequestError
from shoal.core.facts import ModelFacts, Width
from shoal.core.plan import Plan
from shoal.costs.blocks import find_blocks
from shoal.costs.fake import fake_like, faked
from shoal.costs.layers import ModelCosts, TensorSplit
from shoal.costs.trace import trace_module
from shoal.costs.transformer import TransformerShape, transformer_costs
from shoal.data.batchform import BatchForm, ModelInputs, Targets, arguments_of, map_targets, targets_of
from shoal.data.build import build_splits
from shoal.data.source import Items
from shoal.data.spec import DataSpec
from shoal.models.check import facts_of
from shoal.models.config import GptConfig, Seq2SeqConfig
from shoal.models.losses import Loss, build_loss
from shoal.optim.precision import Precision
from shoal.parallel.analysis.analyse import analyse_module
from shoal.parallel.analysis.structure import ModuleAnalysis, ParallelConfig, SplitKind
from shoal.parallel.requirements import describe_facts
from shoal.planner.config import ShapeConfig
from shoal.planner.hardware.software import Software, find_software
from shoal.trainer.build import build_without_memory
from shoal.trainer.config import Recipe

_CUTS = {
    SplitKind.COLUMN: TensorSplit.COLUMNS,
    SplitKind.LOGITS: TensorSplit.COLUMNS,
    SplitKind.ROW: TensorSplit.ROWS,
    SplitKind.VOCABULARY: TensorSplit.ROWS,
}
_FEW = 2
"""Blocks of a shipped model that are looked at; the others are like the last of them."""


def costs_of(recipe: Recipe, spec: DataSpec, *, device: str = "cpu") -> ModelCosts:
    """The recipe's model and loss as a chain, in its precision.

    Args:
        recipe: names the model; its ``[parallel]`` table corrects what is found in it.
        spec: the shapes of its data.
        device: the type of device that it will run on; the kernels of attention differ.

    Raises:
        RequestError: the model cannot be built, or not be traced without memory; the message says at which operation.
    """
    precision = Precision.named(recipe.train.precision)
    model = build_without_memory(recipe.model, spec).to(dtype=precision.weight_dtype)
    example = _example(recipe, spec)
    inputs = example.model_inputs.map(precision.cast_input)
    call = _FormedCall(model, build_loss(recipe.model, spec), example.form)
    analysis = _analysis(recipe, spec, model, inputs)
    found = [block for stack in analysis.stacks for block in stack.blocks]
    is_shipped = isinstance(recipe.model, GptConfig | Seq2SeqConfig)
    blocks = [block for row in find_blocks(model) for block in row] if is_shipped else found
    chain = trace_module(
        model,
        inputs,
        name=type(model).__name__.lower(),
        blocks=blocks,
        cuts=dict(_spread(_cuts(analysis), found, blocks)),
        compute_dtype=precision.compute_dtype,
        loss=call.loss,
        targets=map_targets(example.targets, precision.cast_input),
        device=device,
        arguments=call.arguments,
    )
    heads = {(heads.num_heads, heads.num_kv_heads) for heads in analysis.attentions}
    if len(heads) == 1:
        query, key = heads.pop()
        chain = replace(chain, heads=query, kv_heads=key)
    return replace(chain, tokens=float(spec.tokens_per_sample)) if spec.kind != "own" else chain


def facts_by_looking(recipe: Recipe, spec: DataSpec) -> ModelFacts:
    """What plans must know of a module that only looking at it can tell, without memory.

    Whether blocks mix positions outside of attention, which rules ``sp`` and ``cp`` out, is asked by values that are not there;
    it is taken that they do not, and ``shoal train --dry-run`` tells.
    """
    precision = Precision.named(recipe.train.precision)
    model = build_without_memory(recipe.model, spec).to(dtype=precision.weight_dtype)
    inputs = _example(recipe, spec).model_inputs.map(precision.cast_input)
    analysis = _analysis(recipe, spec, model, inputs)
    stacks = tuple(
        replace(stack, is_pointwise=stack.is_pointwise or stack.sequence_dim is not None) for stack in analysis.stacks
    )
    return describe_facts(replace(analysis, stacks=stacks), model)


def _analysis(recipe: Recipe, spec: DataSpec, model: nn.Module, inputs: ModelInputs) -> ModuleAnalysis:
    """What the model is made of; of a shipped one, what a copy with few blocks is made of, for looking takes time for each."""
    config = recipe.model
    # The user's corrections may name any block.
    if isinstance(config, GptConfig | Seq2SeqConfig) and recipe.parallel == ParallelConfig():
        model = build_without_memory(config.model_copy(update={"layers": min(config.layers, _FEW)}), spec)
    with faked(model) as mode, mode:
        return analyse_module(model, inputs.map(lambda tensor: fake_like(tensor, mode)), recipe.parallel)


def _cuts(analysis: ModuleAnalysis) -> dict[str, TensorSplit]:
    pieces = {heads.path: TensorSplit.ALL for heads in analysis.attentions if heads.is_torch}
    return {**{split.path: _CUTS[split.kind] for split in analysis.splits}, **pieces}


def _spread(cuts: Mapping[str, TensorSplit], found: list[str], blocks: list[str]) -> Iterator[tuple[str, TensorSplit]]:
    """The cuts, those of a row's last found block in every later block of the row as well."""
    yield from cuts.items()
    rows = {block.rpartition(".")[0]: block for block in found}
    for block in blocks:
        like = rows.get(block.rpartition(".")[0])
        if like is not None and block not in found:
            for path, cut in cuts.items():
                if path.startswith(like + "."):
                    yield block + path.removeprefix(like), cut


class _FormedCall:
    """How a module is called with flat inputs, and what its loss then gets."""

    def __init__(self, model: nn.Module, loss: Loss, form: BatchForm | None) -> None:
        self._model, self._loss, self._form = model, loss, form
        self._inputs = ModelInputs(())

    def arguments(self, inputs: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._inputs = ModelInputs(inputs, self._form)
        return arguments_of(self._model, self._inputs)

    def loss(self, output: Any, targets: Targets) -> Tensor:
        return self._loss(output, targets_of(self._form, self._inputs, targets))


def _example(recipe: Recipe, spec: DataSpec) -> Items:
    """Inputs and targets of two samples, by the shapes of the data; of the user's own data, two real ones."""
    with torch.device("meta"):
        if spec.kind in ("tokens", "pairs") and spec.sequence:
            ids = torch.empty((2, spec.sequence), dtype=torch.int64)
            return Items(inputs=(ids,) if spec.kind == "tokens" else (ids, ids), targets=ids, weight=1)
        if spec.kind in ("classes", "regression") and spec.features:
            is_class = spec.kind == "classes"
            targets = torch.empty(2, dtype=torch.int64) if is_class else torch.empty((2, spec.outputs or 1))
            return Items(inputs=(torch.empty((2, *spec.features)),), targets=targets, weight=1)
    samples = build_splits(recipe.data, recipe.train.seed).train
    if len(samples) < 2:
        raise RequestError(f"the data has {len(samples)} sample(s); a model is looked at with two: give it more")
    return samples.collate(range(2))


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


def costs_for(recipe: Recipe, spec: DataSpec | None) -> ModelCosts:
    """The model to plan for: the recipe's module as accelerators run it, or the shape that stands in its place.

    Args:
        recipe: the recipe.
        spec: of its data; a shape does not ask for it.

    Raises:
        RequestError: the module cannot be traced.
    """
    if recipe.planner.shape is not None:
        return shape_costs(recipe.planner.shape, recipe.train.precision, find_software(recipe.planner.software))
    assert spec is not None, "a module is built for its data"
    return costs_of(recipe, spec, device="cuda")


def shape_costs(shape: ShapeConfig, precision: str, software: Software) -> ModelCosts:
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
    return transformer_costs(
        TransformerShape(
            # The recipe calls the numbers of a shape as the costs do.
            **shape.model_dump(exclude={"gated"}),
            is_gated=shape.gated,
            learned_positions=not shape.gated,
            dropout=False,
            fused_attention=software.fused_attention,
            fused_loss=software.fused_loss,
            fused_pointwise=software.fused_pointwise,
            item_bytes=item_bytes,
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
