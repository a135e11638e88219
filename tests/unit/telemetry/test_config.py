"""The telemetry section refuses what makes no sense, in words."""

import pytest

from shoal.core.config import validate
from shoal.core.errors import RequestError
from shoal.telemetry.config import TelemetryConfig, parse_window


def test_window() -> None:
    assert parse_window("10:20") == (10, 20)
    assert parse_window(" 1 : 2 ") == (1, 2)


@pytest.mark.parametrize("text", ["", "10", "10:", ":20", "a:b", "20:10", "5:5", "0:3", "-1:3", "1:2:3", "1.5:3"])
def test_wrong_window(text: str) -> None:
    with pytest.raises(ValueError, match="steps"):
        parse_window(text)


def test_section_says_what_is_wrong() -> None:
    with pytest.raises(RequestError, match=r"profile: '20' is not a range of steps"):
        validate(TelemetryConfig, {"profile": "20"}, origin="recipe")
    with pytest.raises(RequestError, match="did you mean 'tensorboard'"):
        validate(TelemetryConfig, {"tensorbord": True}, origin="recipe")
