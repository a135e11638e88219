"""From a ``[model]`` section and the shapes of the data to a module and its loss."""

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shoal.core.errors import RequestError
from shoal.core.functions import call_own
from shoal.models.check import DataShape, check_model, count_outputs, image_shape, load_build
from shoal.models.cnn import Cnn
from shoal.models.config import AnyModelConfig, CnnConfig, GptConfig, MlpConfig, OwnModelConfig, Seq2SeqConfig
from shoal.models.gpt import Gpt
from shoal.models.lora import add_adapters
from shoal.models.mlp import Mlp
from shoal.models.seq2seq import Seq2Seq
from shoal.telemetry.memory import is_out_of_memory


def build_model(config: AnyModelConfig, spec: DataShape) -> nn.Module:
    """The module, its weights drawn from torch's generator as the caller seeded it.

    Raises:
        RequestError: the model cannot be built or cannot read the data; the numbers and the fix are in the message.
    """
    model = _build_plain(config, spec)
    return model if config.lora is None else add_adapters(model, config.lora)


def _build_plain(config: AnyModelConfig, spec: DataShape) -> nn.Module:
    check_model(config, spec)
    if isinstance(config, OwnModelConfig):
        return _build_own(config, spec)
    if isinstance(config, GptConfig):
        return Gpt(config, vocab=spec.vocab or 0, sequence=spec.sequence or 0)
    if isinstance(config, Seq2SeqConfig):
        return Seq2Seq(config, vocab=spec.vocab or 0, sequence=spec.sequence or 0)
    features, outputs = spec.features, count_outputs(spec)
    assert features is not None and outputs is not None, "check_model refuses data without them"
    if isinstance(config, MlpConfig):
        return Mlp(config, features=features, outputs=outputs)
    return _build_cnn(config, features, outputs)


def refuse_lazy(model: nn.Module, *, what: str = "the model") -> None:
    """Refuse a module with layers that get their sizes from the first batch, such as ``LazyLinear``.

    A plan is made of sizes, and processes must start from the same weights, before any batch is read.

    Raises:
        RequestError: names the first such layer.
    """
    for name, module in model.named_modules():
        if any(is_lazy(tensor) for tensor in _own_tensors(module)):
            raise RequestError(
                f"{what}: layer {name!r} is a {type(module).__name__}, whose sizes are not known before it has seen a batch; "
                f"give them, as in nn.{type(module).__name__.removeprefix('Lazy')}(...), or run a sample through it in build"
            )


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers of a module, without those of its children."""
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _build_cnn(config: CnnConfig, features: tuple[int, ...], outputs: int) -> Cnn:
    image = image_shape(features)
    assert image is not None, "check_model refuses features that are no image"
    return Cnn(config, image=image, outputs=outputs)


def _build_own(config: OwnModelConfig, spec: DataShape) -> nn.Module:
    model = call_own(load_build(config, spec), what=f"model.build = {config.build!r}", is_excused=is_out_of_memory)
    if not isinstance(model, nn.Module):
        raise RequestError(f"model.build = {config.build!r} returned a {type(model).__name__}; return an nn.Module")
    refuse_lazy(model, what=f"model.build = {config.build!r}")
    return model
