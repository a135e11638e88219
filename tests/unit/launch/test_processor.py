"""A processor that announces tiles and hides their shape."""

import os
import subprocess
import sys

import pytest

from shoal.launch.processor import VARIABLE, WITHOUT_TILES, avoid_hidden_tiles, hides_tiles

INFO = "processor\t: 0\nmodel name\t: Some Processor\ncpuid level\t: {level}\nflags\t\t: fpu sse {flag}avx2\n\nprocessor\t: 1\n"


@pytest.mark.parametrize(
    ("level", "flag", "is_hidden"),
    [("28", "amx_tile ", True), ("32", "amx_tile ", False), ("28", "", False), ("", "amx_tile ", False)],
)
def test_tiles_are_hidden_when_they_are_announced_and_have_no_shape(level, flag, is_hidden, tmp_path):
    assert hides_tiles(INFO.format(level=level, flag=flag)) == is_hidden
    (tmp_path / "cpuinfo").write_text(INFO.format(level=level, flag=flag))
    environment = {}
    assert avoid_hidden_tiles(environment, str(tmp_path / "cpuinfo")) == is_hidden
    assert environment == ({VARIABLE: WITHOUT_TILES} if is_hidden else {})


def test_what_the_user_has_set_stays_and_a_system_that_says_nothing_is_left_alone(tmp_path):
    (tmp_path / "cpuinfo").write_text(INFO.format(level="28", flag="amx_tile "))
    environment = {VARIABLE: "AVX2"}
    assert avoid_hidden_tiles(environment, str(tmp_path / "cpuinfo")) and environment == {VARIABLE: "AVX2"}
    assert not avoid_hidden_tiles({}, str(tmp_path / "missing"))


def test_a_product_in_bfloat16_does_not_end_the_process():
    """Whatever the processor says of itself: the environment is as ``shoal`` and a ``Trainer`` make it."""
    product = "torch.nn.Linear(64, 64, dtype=torch.bfloat16)(torch.ones(4, 64, dtype=torch.bfloat16))"
    code = f"import os, torch; from shoal.launch.processor import avoid_hidden_tiles; avoid_hidden_tiles(os.environ); {product}"
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=environment)
