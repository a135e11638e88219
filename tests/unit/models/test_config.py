"""The ``[model]`` section: which config a table becomes, what is derived, what is refused."""

import pytest

from shoal.core.config import Config, validate
from shoal.core.errors import RequestError
from shoal.models.config import CnnConfig, GptConfig, MlpConfig, ModelConfig, OwnModelConfig, Seq2SeqConfig, derive_ffn


class Section(Config):
    """Stands in for a recipe."""

    model: ModelConfig
    """The model."""


@pytest.mark.parametrize(
    ("table", "kind"),
    [
        ({"name": "gpt"}, GptConfig),
        ({"name": "cnn", "channels": [4, 8]}, CnnConfig),
        ({"name": "mlp", "batch_norm": True}, MlpConfig),
        ({"name": "seq2seq"}, Seq2SeqConfig),
        ({"build": "mine:build", "args": {"width": 3}, "loss": "mine:loss"}, OwnModelConfig),
    ],
)
def test_a_table_becomes_the_config_of_its_model(table: dict[str, object], kind: type) -> None:
    section = validate(Section, {"model": table}, origin="recipe")
    assert type(section.model) is kind


def test_a_misspelt_key_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(RequestError, match="did you mean 'hidden'"):
        validate(Section, {"model": {"name": "gpt", "hiden": 64}}, origin="recipe")


def test_an_unknown_model_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(RequestError, match="no 'gtp'; did you mean 'gpt'"):
        validate(Section, {"model": {"name": "gtp"}}, origin="recipe")


@pytest.mark.parametrize("dropout", [-0.1, 1.0])
def test_a_dropout_that_is_no_probability_is_refused(dropout: float) -> None:
    with pytest.raises(RequestError, match=f"found {dropout}"):
        validate(Section, {"model": {"name": "gpt", "dropout": dropout}}, origin="recipe")


@pytest.mark.parametrize(("hidden", "ffn"), [(3, 8), (24, 64), (128, 344), (256, 688)])
def test_ffn_is_derived_as_eight_thirds_rounded_up_to_eight(hidden: int, ffn: int) -> None:
    assert derive_ffn(hidden) == ffn
    assert GptConfig(hidden=hidden).ffn_size == ffn
    assert GptConfig(hidden=hidden, ffn=17).ffn_size == 17


def test_kv_heads_are_heads_when_left_out() -> None:
    assert GptConfig(heads=8).num_kv_heads == 8
    assert GptConfig(heads=8, kv_heads=2).num_kv_heads == 2
