"""The ``[data]`` section."""

import pytest

from shoal.core.config import Config, validate
from shoal.core.errors import RequestError
from shoal.data.config import (
    DataConfig,
    DigitsConfig,
    OwnDataConfig,
    StdlibConfig,
    SyntheticConfig,
    TextConfig,
    TokensConfig,
)


class Section(Config):
    """Stands in for a recipe."""

    data: DataConfig
    """The data."""


@pytest.mark.parametrize(
    ("table", "kind"),
    [
        ({"source": "stdlib"}, StdlibConfig),
        ({"source": "text", "path": "."}, TextConfig),
        ({"source": "tokens", "path": "a.npy"}, TokensConfig),
        ({"source": "synthetic", "features": [1, 8, 8]}, SyntheticConfig),
        ({"source": "digits"}, DigitsConfig),
        ({"build": "mine:data", "args": {"size": 3}}, OwnDataConfig),
    ],
)
def test_a_table_becomes_the_config_of_its_source(table: dict[str, object], kind: type) -> None:
    assert type(validate(Section, {"data": table}, origin="recipe").data) is kind


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"source": "stdlb"}, "did you mean 'stdlib'"),
        ({"source": "text"}, "key 'data.path' is missing"),
        ({"source": "stdlib", "sequnce": 3}, "did you mean 'sequence'"),
        (
            {"source": "stdlib", "validation": 0.5, "test": 0.5},
            "validation 0.5 \\+ test 0.5 leave nothing for training",
        ),
        ({"source": "stdlib", "sequence": 0}, "found 0"),
        ({"source": "synthetic", "kind": "sounds"}, "the choices are classes, regression, reverse, tokens"),
    ],
)
def test_a_wrong_table_is_refused(table: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        validate(Section, {"data": table}, origin="recipe")
