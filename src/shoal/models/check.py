"""Whether a model fits its data, and the numbers of it that a plan depends on: known before torch is imported.

So the command line refuses a wrong recipe or plan at once. What is said here of a shipped model must be what
``parallel/analysis`` sees in the built module; a test compares the two.
"""

from collections.abc import Callable
from typing import Any, Protocol

from shoal.core.errors import RequestError
from shoal.core.facts import ModelFacts, Width
from shoal.core.functions import bind_arguments, takes_argument
from shoal.core.functions import load_function as load_function
from shoal.models.config import AnyModelConfig, CnnConfig, GptConfig, MlpConfig, OwnModelConfig, Seq2SeqConfig


class DataShape(Protocol):
    """The shapes of the data, read-only: what a model reads of ``DataSpec``, which belongs to a room on the same row."""

    @property
    def kind(self) -> str:
        """tokens, classes, regression, pairs or own."""

    @property
    def vocab(self) -> int | None:
        """Number of token ids."""

    @property
    def sequence(self) -> int | None:
        """Tokens of a sample's input."""

    @property
    def features(self) -> tuple[int, ...] | None:
        """Shape of a sample's input where it is not tokens."""

    @property
    def classes(self) -> int | None:
        """Number of classes."""

    @property
    def outputs(self) -> int | None:
        """Numbers that a regression predicts per sample."""


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


def load_build(config: OwnModelConfig, spec: DataShape | None) -> Callable[[], Any]:
    """The user's build with its arguments bound, ready to be called.

    Raises:
        RequestError: it cannot be imported, or does not take the arguments of the recipe.
    """
    function = load_function(config.build, key="model.build")
    arguments = dict(config.args)
    if takes_argument(function, "spec") and "spec" not in arguments:
        arguments["spec"] = spec
    bind_arguments(function, arguments, key=f"model.build = {config.build!r}")
    return lambda: function(**arguments)


def load_loss(config: AnyModelConfig) -> Callable[..., Any] | None:
    """The user's own loss, or None when the recipe names none.

    Raises:
        RequestError: it cannot be imported.
    """
    return None if config.loss is None else load_function(config.loss, key="model.loss")


def facts_of(config: AnyModelConfig, spec: DataShape) -> ModelFacts | None:
    """The facts of a shipped model; None for the user's own and for one with adapters, which must be built to be known."""
    if isinstance(config, OwnModelConfig) or config.lora is not None:
        return None
    if isinstance(config, GptConfig):
        return _transformer_facts(config, spec, num_blocks=config.layers, num_pairs=2 * config.layers)
    if isinstance(config, Seq2SeqConfig):
        return _transformer_facts(config, spec, num_blocks=2 * config.layers, num_pairs=5 * config.layers)
    if isinstance(config, CnnConfig):
        width = Width(name="model.hidden", size=config.hidden)
        return ModelFacts(
            name="the cnn", num_pairs=1, widths=(width,), has_batch_norm=True, keeps_statistics=True, num_units=8
        )
    return _mlp_facts(config)


def _transformer_facts(
    config: GptConfig | Seq2SeqConfig, spec: DataShape, *, num_blocks: int, num_pairs: int
) -> ModelFacts:
    kv_heads = config.num_kv_heads if isinstance(config, GptConfig) else config.heads
    return ModelFacts(
        name=f"the {config.name}",
        num_blocks=num_blocks,
        num_pairs=num_pairs,
        widths=(Width(name="the feed-forward layer (model.ffn)", size=config.ffn_size),),
        heads=((config.heads, kv_heads),),
        has_attention=True,
        sequence=spec.sequence,
        has_sequence=True,
        # What lies before and after the blocks of a gpt: embedding, its dropout, norm and head.
        num_units=num_blocks + 4 if isinstance(config, GptConfig) else None,
        tied_ends="embedding.weight" if isinstance(config, GptConfig) and config.tied else "",
    )


def _mlp_facts(config: MlpConfig) -> ModelFacts:
    # Batch norm lies between every two linear layers and has a weight per feature, so no pair is left.
    num_pairs = 0 if config.batch_norm else (config.layers + 1) // 2
    return ModelFacts(
        name="the mlp",
        num_blocks=config.layers,
        num_pairs=num_pairs,
        widths=(Width(name="model.hidden", size=config.hidden),) if num_pairs else (),
        has_batch_norm=config.batch_norm,
        keeps_statistics=config.batch_norm,
        num_units=config.layers + 1,
        note="batch norm lies between its layers" if config.batch_norm else "",
    )
