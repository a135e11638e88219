"""Whether a model fits its data, decided from numbers alone, so that the command line refuses before it imports torch."""

from shoal.core.errors import RequestError
from shoal.models.config import AnyModelConfig, CnnConfig, GptConfig, MlpConfig, OwnModelConfig, Seq2SeqConfig
from shoal.models.own import load_build, load_loss
from shoal.models.shape import DataShape

# What each shipped model reads of the data: (kinds it is made for, numbers it needs).
_NEEDS: dict[type, tuple[tuple[str, ...], tuple[str, ...]]] = {
    GptConfig: (("tokens",), ("vocab", "sequence")),
    Seq2SeqConfig: (("pairs",), ("vocab", "sequence")),
    CnnConfig: (("classes", "regression"), ("features",)),
    MlpConfig: (("classes", "regression"), ("features",)),
}
_MODEL_FOR = {"tokens": "gpt", "pairs": "seq2seq", "classes": "mlp or cnn", "regression": "mlp or cnn"}


def check_model(config: AnyModelConfig, spec: DataShape | None) -> None:
    """Refuse a model that cannot be built or cannot read the data.

    Args:
        config: the ``[model]`` section.
        spec: the shapes of the data; None when they are not known before the user's own data is built.

    Raises:
        RequestError: lists every problem with its numbers and its fix.
    """
    load_loss(config)
    if isinstance(config, OwnModelConfig):
        load_build(config, spec)
        return
    problems = _size_problems(config)
    if spec is not None:
        problems += _data_problems(config, spec)
    if problems:
        raise RequestError("\n".join(f"model {config.name!r}: {problem}" for problem in problems))


def count_outputs(spec: DataShape) -> int | None:
    """Numbers that a classifier or a regression puts out per sample; None when the data does not say."""
    return spec.classes if spec.classes is not None else spec.outputs


def image_shape(features: tuple[int, ...]) -> tuple[int, int, int] | None:
    """(channels, height, width) of a sample; None when it is not an image."""
    if len(features) == 2:
        return (1, features[0], features[1])
    if len(features) == 3:
        return (features[0], features[1], features[2])
    return None


def _size_problems(config: GptConfig | CnnConfig | MlpConfig | Seq2SeqConfig) -> list[str]:
    found: list[str] = []
    if not isinstance(config, GptConfig | Seq2SeqConfig):
        return found
    if config.hidden % config.heads:
        fits = config.heads * max(1, round(config.hidden / config.heads))
        found.append(
            f"heads {config.heads} do not divide hidden {config.hidden}; set hidden to {fits}, or change heads"
        )
    elif (config.hidden // config.heads) % 2:
        head = config.hidden // config.heads
        found.append(
            f"hidden {config.hidden} / heads {config.heads} = {head} is odd and rotary positions turn pairs; "
            f"set hidden to {config.heads * (head + 1)}"
        )
    if isinstance(config, GptConfig) and config.heads % config.num_kv_heads:
        divisors = ", ".join(str(count) for count in range(1, config.heads + 1) if config.heads % count == 0)
        found.append(
            f"kv_heads {config.kv_heads} do not divide heads {config.heads}; set kv_heads to one of {divisors}"
        )
    return found


def _data_problems(config: GptConfig | CnnConfig | MlpConfig | Seq2SeqConfig, spec: DataShape) -> list[str]:
    kinds, numbers = _NEEDS[type(config)]
    if spec.kind != "own" and spec.kind not in kinds:
        return [
            f"it reads data of the kind {' or '.join(kinds)}, and this data is {spec.kind}; "
            f"set model.name to {_MODEL_FOR.get(spec.kind, 'your own build')}, or choose another data.source"
        ]
    missing = [number for number in numbers if getattr(spec, number) is None]
    if isinstance(config, CnnConfig | MlpConfig) and count_outputs(spec) is None:
        missing.append("classes")
    if missing:
        names = " and ".join(missing)
        return [f"the data does not say its {names}; give your dataset the attribute {names}, or build your own model"]
    if isinstance(config, CnnConfig) and spec.features is not None:
        image = image_shape(spec.features)
        if image is None or min(image[1:]) < 4:
            shape = "x".join(str(size) for size in spec.features)
            return [f"a sample is {shape} and two pools need an image of at least 4x4; set model.name to mlp"]
    return []
