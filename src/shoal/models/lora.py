"""Low-rank adapters in a model, by ``peft`` as it is: what it puts into a module is trained, and everything else is frozen.

The module keeps its class, its forward pass and its place in a plan; only the adapted layers change, and the names inside them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from shoal.core.errors import RequestError
from shoal.models.config import LoraConfig


def add_adapters(model: nn.Module, config: LoraConfig) -> nn.Module:
    """The model with an adapter in every layer whose name fits, drawn from torch's generator; changed in place.

    Raises:
        RequestError: peft is not installed, or has no adapter for such layers.
    """
    peft = _require_peft()
    targets = config.targets[0] if config.targets == ("all-linear",) else list(config.targets)
    chosen = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=targets,
        lora_dropout=config.dropout,
        bias=config.bias,
    )
    try:
        # No wrapper around the model: it is called as before.
        adapted: nn.Module = peft.inject_adapter_in_model(chosen, model)
    except ValueError as error:
        layers = sorted({name.rpartition(".")[2] for name, one in model.named_modules() if isinstance(one, nn.Linear)})
        raise RequestError(
            f"model.lora.targets {list(config.targets)}: {str(error).splitlines()[0][:200]}; the linear layers of the model end "
            f"in {', '.join(layers) or 'nothing: it has none'}"
        ) from error
    return adapted


def _require_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise RequestError(
            f"model.lora needs peft, which is not installed ({error}); install it: pip install 'shoal[hf]'"
        ) from error
    return peft


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


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """What peft keeps of an adapted model, by its names there: the adapters, and the biases that are trained beside them."""
    peft = _require_peft()
    kept: dict[str, Tensor] = peft.get_peft_model_state_dict(model)
    return kept


def base_state(model: nn.Module) -> dict[str, Tensor]:
    """The weights and buffers of an adapted model that are none of its adapters, by their names before it was adapted."""
    return {
        name.replace(".base_layer.", "."): tensor for name, tensor in model.state_dict().items() if ".lora_" not in name
    }


def write_adapters(model: nn.Module, folder: Path, *, base: nn.Module, inside: str, source: str | None) -> None:
    """Write the adapters of a model as peft does: adapter_config.json and adapter_model.safetensors.

    Args:
        model: with adapters of ``add_adapters``.
        folder: where to; it exists.
        base: the model that they are loaded onto.
        inside: what that one is called in ``model``; empty where it is the model itself.
        source: where its weights are found, if anybody knows.
    """
    prefix = f"{inside}." if inside else ""
    held: Any = model
    config = held.peft_config["default"]
    config.inference_mode = True
    config.base_model_name_or_path = source
    config.auto_mapping = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    if isinstance(config.target_modules, set | list):
        config.target_modules = sorted(name.removeprefix(prefix) for name in config.target_modules)
    kept: Mapping[str, Tensor] = adapter_state(model)
    save_file(
        {f"base_model.model.{name.removeprefix(prefix)}": one.contiguous().clone() for name, one in kept.items()},
        folder / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )
    config.save_pretrained(str(folder))


def load_adapters(base: nn.Module, folder: Path) -> nn.Module:
    """What peft makes of a folder and the model that its adapters are for, which is changed in place."""
    peft = _require_peft()
    loaded: nn.Module = peft.PeftModel.from_pretrained(base, str(folder)).eval()
    return loaded
