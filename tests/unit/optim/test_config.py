"""The ``[optim]`` section: defaults, refusals, and that reading it imports no torch."""

import subprocess
import sys

import pytest

from shoal.core.config import validate
from shoal.core.errors import RequestError
from shoal.optim.config import OptimConfig


def refusal(**keys: object) -> str:
    with pytest.raises(RequestError) as caught:
        validate(OptimConfig, keys, origin="recipe")
    return str(caught.value)


def test_defaults_are_adamw_without_decay_clip_or_schedule():
    config = OptimConfig()
    assert (config.name, config.lr, config.weight_decay, config.clip, config.schedule, config.warmup) == (
        "adamw",
        1e-3,
        0.0,
        None,
        "constant",
        0,
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lr", 0),
        ("lr", -1),
        ("lr", float("nan")),
        ("lr", float("inf")),
        ("momentum", 1.0),
        ("momentum", -0.1),
        ("betas", (0.9, 1.0)),
        ("betas", (0.9,)),
        ("eps", 0),
        ("weight_decay", -1e-3),
        ("clip", 0),
        ("warmup", -1),
        ("final", 1.5),
        ("plateau_factor", 1.0),
        ("plateau_patience", 0),
        ("trust", 0),
        ("name", "adamax"),
        ("schedule", "cosin"),
    ],
)
def test_a_value_out_of_range_is_refused_by_key(key, value):
    assert key in refusal(**{key: value})


@pytest.mark.parametrize("name", ["momentum", "nesterov"])
def test_momentum_without_momentum_is_refused_with_the_fix(name):
    assert "set name to sgd" in refusal(name=name, momentum=0)


def test_a_misspelt_key_is_answered_with_the_nearest():
    assert "weight_decay" in refusal(weight_decy=0.1)


def test_every_field_has_help():
    missing = [name for name, field in OptimConfig.model_fields.items() if not field.description]
    assert missing == []


def test_reading_the_section_imports_no_torch():
    code = "import sys, shoal.optim.config, shoal.optim.rates; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0


def test_a_momentum_that_nobody_reads_is_refused_where_it_was_written():
    assert "momentum 0.9 is not read by sgd; set name to momentum or nesterov" in refusal(name="sgd", momentum=0.9)
    assert "momentum 0.5 is not read by adamw; adam and its kin have betas" in refusal(name="adamw", momentum=0.5)
    OptimConfig(name="sgd", momentum=0.0)
    resolved = {key: value for key, value in OptimConfig(name="sgd").model_dump().items() if value is not None}
    assert OptimConfig(**resolved).name == "sgd", "a resolved recipe has every key"
