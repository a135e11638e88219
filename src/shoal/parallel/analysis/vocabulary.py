"""Embeddings over a vocabulary and the output layer that scores it: the two matrices that are cut along the vocabulary."""

from torch import Tensor, nn

from shoal.costs.blocks import is_under
from shoal.parallel.analysis.structure import Split, SplitKind, Stack
from shoal.parallel.analysis.trace import IS_OUTPUT, Trace, is_linear, linear_sizes

_FEWEST_ROWS = 16  # Two token types or eight positions are not worth a collective.


def find_vocabulary(model: nn.Module, trace: Trace, stacks: tuple[Stack, ...]) -> tuple[list[Split], dict[str, str]]:
    """The splits along a vocabulary, and why other embeddings and output layers are left whole."""
    embeddings: dict[str, nn.Embedding] = {}
    reasons: dict[str, str] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            reason = _embedding_obstacle(path, module, trace)
            if reason is None:
                embeddings[path] = module
            else:
                reasons[path] = reason
    head, why = _find_head(model, trace, embeddings, stacks)
    if why is not None:
        reasons[why[0]] = why[1]
    for names in shared_parameters(model):
        owners = {name.rpartition(".")[0] for name in names}
        for path in owners & embeddings.keys():
            if not owners <= embeddings.keys() | {head}:
                others = ", ".join(sorted(owners - embeddings.keys() - {head}))
                reasons[path] = f"its weight is also that of {others}, which stays whole"
    embeddings = {path: module for path, module in embeddings.items() if path not in reasons}
    splits = [Split(path=path, kind=SplitKind.VOCABULARY) for path in embeddings]
    if head is not None:
        splits.append(Split(path=head, kind=SplitKind.LOGITS))
    return splits, reasons


def shared_parameters(model: nn.Module) -> list[tuple[str, ...]]:
    """Names that are one parameter, first name first."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [tuple(group) for group in names.values() if len(group) > 1]


def _embedding_obstacle(path: str, module: nn.Embedding, trace: Trace) -> str | None:
    if type(module) is not nn.Embedding:
        return "a class of its own, which may compute anything"
    if path not in trace.embedded:
        return "it did not run in the traced pass"
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        return "max_norm, scale_grad_by_freq and sparse need all of its rows"
    if _owners_used_outside(path, module, trace):
        return "something besides the layer itself uses its weight"
    if module.num_embeddings < _FEWEST_ROWS:
        return f"its {module.num_embeddings} rows are too few to be worth sharing"
    inputs = {tensor.storage for tensor in trace.inputs if not tensor.is_floating_point()}
    if not all(ids.storage in inputs for ids in trace.embedded[path]):
        return "its indices are not the model's input: positions or types"
    return None


def _owners_used_outside(path: str, module: nn.Module, trace: Trace) -> bool:
    owners = {trace.owners.get(parameter, path) for parameter in module.parameters()}
    return bool((owners | {path}) & trace.follower.used_outside)


def _find_head(
    model: nn.Module, trace: Trace, embeddings: dict[str, nn.Embedding], stacks: tuple[Stack, ...]
) -> tuple[str | None, tuple[str, str] | None]:
    """The layer that scores a vocabulary; or the one that would, and why it is left whole."""
    sizes = {module.num_embeddings for module in embeddings.values()}
    for path in reversed(trace.follower.order):
        module = model.get_submodule(path)
        if linear_sizes(module)[1] not in sizes or any(
            is_under(path, block) for stack in stacks for block in stack.blocks
        ):
            continue
        weight = module.weight
        tied = {name for name, other in embeddings.items() if other.weight is weight}
        group = trace.follower.groups[trace.follower.groups.by_producer[path]]
        if not _is_output(trace, path) or group.obstacle != IS_OUTPUT or group.rows or len(group.producers) > 1:
            return None, (path, "its scores are not the model's output as they are")
        if _owners_used_outside(path, module, trace) and not tied:
            return None, (path, "something besides the layer itself uses its weight")
        if not is_linear(module) or not _is_shared_with(model, module, embeddings):
            return None, (path, "its weight is another layer's too")
        return path, None
    return None, None


def _is_output(trace: Trace, path: str) -> bool:
    outputs = trace.linear_outputs[path]
    return trace.has_scores and len(outputs) == 1 and outputs[:1] == trace.outputs[:1]


def _is_shared_with(model: nn.Module, head: nn.Module, embeddings: dict[str, nn.Embedding]) -> bool:
    """True when nobody but a vocabulary's embedding has the head's weight."""
    weight = head.weight
    assert isinstance(weight, Tensor)
    holders = [module for module in model.modules() if weight is vars(module).get("_parameters", {}).get("weight")]
    return all(module is head or module in embeddings.values() for module in holders)
