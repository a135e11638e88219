"""Models that do not fit are refused with their numbers and a fix."""

from dataclasses import dataclass

import pytest

from shoal.core.errors import RequestError
from shoal.models.check import check_model
from shoal.models.config import AnyModelConfig, CnnConfig, GptConfig, MlpConfig, OwnModelConfig, Seq2SeqConfig


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The protocol's fields, as a value."""

    kind: str
    vocab: int | None = None
    sequence: int | None = None
    features: tuple[int, ...] | None = None
    classes: int | None = None
    outputs: int | None = None


TOKENS = Shape(kind="tokens", vocab=256, sequence=32)
DIGITS = Shape(kind="classes", features=(1, 8, 8), classes=10)
VECTORS = Shape(kind="classes", features=(16,), classes=4)
PAIRS = Shape(kind="pairs", vocab=16, sequence=8)


@pytest.mark.parametrize(
    ("config", "spec"),
    [
        (GptConfig(heads=4, kv_heads=2), TOKENS),
        (CnnConfig(), DIGITS),
        (MlpConfig(), DIGITS),
        (MlpConfig(), Shape(kind="regression", features=(3,), outputs=2)),
        (Seq2SeqConfig(), PAIRS),
        (GptConfig(), Shape(kind="own", vocab=10, sequence=4)),
        (GptConfig(), None),
    ],
)
def test_a_model_that_fits_is_accepted(config: AnyModelConfig, spec: Shape | None) -> None:
    check_model(config, spec)


@pytest.mark.parametrize(
    ("config", "spec", "message"),
    [
        (GptConfig(hidden=130, heads=4), TOKENS, "heads 4 do not divide hidden 130; set hidden to 128"),
        (GptConfig(hidden=12, heads=4), TOKENS, "12 / heads 4 = 3 is odd .* set hidden to 16"),
        (GptConfig(heads=4, kv_heads=3), TOKENS, "kv_heads 3 do not divide heads 4; set kv_heads to one of 1, 2, 4"),
        (Seq2SeqConfig(hidden=30, heads=4), PAIRS, "heads 4 do not divide hidden 30"),
        (GptConfig(), DIGITS, "kind tokens, and this data is classes; set model.name to mlp or cnn"),
        (MlpConfig(), TOKENS, "set model.name to gpt"),
        (Seq2SeqConfig(), TOKENS, "kind pairs, and this data is tokens"),
        (CnnConfig(), VECTORS, "a sample is 16 and two pools need an image of at least 4x4; set model.name to mlp"),
        (CnnConfig(), Shape(kind="classes", features=(1, 3, 9), classes=2), "1x3x9"),
        (MlpConfig(), Shape(kind="own", features=(3,)), "does not say its classes; give your dataset the attribute"),
        (GptConfig(), Shape(kind="own", sequence=3), "does not say its vocab"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(config: AnyModelConfig, spec: Shape, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        check_model(config, spec)


def test_an_own_loss_that_is_not_there_is_refused() -> None:
    with pytest.raises(RequestError, match=r"model\.loss = 'math:floot'.*did you mean 'floor'"):
        check_model(GptConfig(loss="math:floot"), TOKENS)


def test_an_own_build_is_checked_without_being_called() -> None:
    check_model(OwnModelConfig(build="sys:exit"), None)
    with pytest.raises(RequestError, match=r"model\.build = 'textwrap:fill': missing a required argument: 'text'"):
        check_model(OwnModelConfig(build="textwrap:fill"), None)
    check_model(OwnModelConfig(build="textwrap:fill", args={"text": "a"}), None)
    with pytest.raises(RequestError, match="unexpected keyword argument 'texts'"):
        check_model(OwnModelConfig(build="textwrap:TextWrapper", args={"texts": 1}), None)
