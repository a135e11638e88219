"""Low-rank adapters in a model, by ``peft`` as it is: what it puts into a module is trained, and everything else is frozen.

The module keeps its class, its forward pass and its place in a plan; only the adapted layers change, and the names inside them.
"""

from torch import nn

from shoal.core.errors import RequestError
from shoal.models.config import LoraConfig


def add_adapters(model: nn.Module, config: LoraConfig) -> nn.Module:
    """The model with an adapter in every layer whose name fits, drawn from torch's generator; changed in place.

    Raises:
        RequestError: peft is not installed, or has no adapter for such layers.
    """
    try:
        import peft
    except ImportError as error:
        raise RequestError(
            f"model.lora needs peft, which is not installed ({error}); install it: pip install 'shoal[hf]'"
        ) from error
    targets = config.targets[0] if config.targets == ("all-linear",) else list(config.targets)
    chosen = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]
        target_modules=targets,
        lora_dropout=config.dropout,
        bias=config.bias,
    )
    try:
        # No wrapper around the model: it is called as before.
        return peft.inject_adapter_in_model(chosen, model)
    except ValueError as error:
        layers = sorted({name.rpartition(".")[2] for name, one in model.named_modules() if isinstance(one, nn.Linear)})
        raise RequestError(
            f"model.lora.targets {list(config.targets)}: {str(error).splitlines()[0][:200]}; the linear layers of the model end "
            f"in {', '.join(layers) or 'nothing: it has none'}"
        ) from error


def merge_adapters(model: nn.Module) -> int:
    """Add every adapter to the layer that it adapts, in place, and take it out; how many there were."""
    adapted = [
        (name, one) for name, one in model.named_modules() if hasattr(one, "merge") and hasattr(one, "base_layer")
    ]
    for name, module in adapted:
        module.merge()
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, module.base_layer)
    return len(adapted)
