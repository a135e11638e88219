"""The ``[checkpoint]`` section."""

import pytest

from shoal.checkpoint.config import CheckpointConfig
from shoal.core.config import validate
from shoal.core.errors import RequestError


def test_the_defaults():
    config = validate(CheckpointConfig, {}, origin="recipe")
    assert (config.every, config.keep, config.keep_every, config.background) == (0, 3, None, True)


@pytest.mark.parametrize("wrong", [{"every": -1}, {"keep": 0}, {"keep_every": 0}, {"evry": 5}])
def test_what_cannot_be_is_refused_with_its_key(wrong):
    with pytest.raises(RequestError, match=next(iter(wrong))):
        validate(CheckpointConfig, wrong, origin="recipe")
