import json
from dataclasses import replace

import pytest

from shoal.checkpoint.files import NotWhole
from shoal.checkpoint.published.version import FileSum, decode, encode, parse_version, version_name
from support.checkpoint.versions import describe

FILES = {name: FileSum(size=3, sha256="a" * 64) for name in ("model.safetensors", "recipe.toml")}


def test_a_description_is_read_as_it_was_written():
    version = replace(describe(7), number=3, files=FILES)
    assert decode(encode(version)) == version


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format", 2),
        ("number", -1),
        ("step", True),
        ("loss", "1"),
        ("weights_sha256", "A" * 64),
        ("inputs", []),
        ("inputs", [{"name": "x", "dtype": "object", "shape": [2], "below": None, "is_sequence": False}]),
        ("inputs", [{"name": "x", "dtype": "int64", "shape": [-2], "below": None, "is_sequence": False}]),
        ("files", {"../../etc/passwd": {"size": 1, "sha256": "a" * 64}}),
        ("files", {}),
        ("more", 1),
    ],
)
def test_what_is_no_description_is_refused(key, value):
    tree = json.loads(encode(replace(describe(7), number=3, files=FILES)))
    with pytest.raises(NotWhole):
        decode(json.dumps({**tree, key: value}).encode())


def test_names_are_read_as_they_are_written():
    assert parse_version(version_name(7)) == 7
    assert parse_version("version-7") is None and parse_version("version-000000007") is None
