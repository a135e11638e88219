"""Names inside a ``checkpoints`` folder."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.checkpoint.files import (
    Beside,
    beside_name,
    draw_id,
    is_id,
    is_shard_name,
    parse_beside,
    parse_step,
    shard_name,
    step_name,
)


@given(st.integers(0, 10**12))
def test_a_step_survives_its_name(step):
    assert parse_step(step_name(step)) == step


@given(st.sampled_from(Beside), st.integers(0, 10**12))
def test_a_beside_name_survives(kind, step):
    id = draw_id()
    parsed = parse_beside(beside_name(kind, step, id))
    assert (parsed.kind, parsed.step, parsed.id) == (kind, step, id)
    assert parse_step(beside_name(kind, step, id)) is None


@pytest.mark.parametrize(
    "name",
    [
        "step-100",
        "step-000000100",
        "step-0000010x",
        "step-\u0660\u0660\u0660\u0660\u0660\u0661\u0660\u0660",
        "step-00000100 ",
        "Step-00000100",
        "step--0000100",
    ],
)
def test_a_name_that_we_would_not_write_is_not_ours(name):
    assert parse_step(name) is None


@pytest.mark.parametrize(
    "name",
    [
        ".tmp-step-00000100",
        ".tmp-step-00000100-xyz",
        ".tmp-step-100-0123456789abcdef",
        ".git",
        "step-00000100",
        ".tmp-step-00000100-0123456789abcdef/..",
    ],
)
def test_a_foreign_folder_is_not_a_leftover(name):
    assert parse_beside(name) is None


@pytest.mark.parametrize(
    "name",
    [
        "../rank-000.safetensors",
        "/rank-000.safetensors",
        "rank-000.safetensors\n",
        "rank-.safetensors",
        "rank-000.pt",
        "",
        "a/rank-000.safetensors",
    ],
)
def test_only_plain_names_are_shards(name):
    assert not is_shard_name(name)


def test_shards_and_ids():
    assert is_shard_name(shard_name(0)) and is_shard_name(shard_name(12345)) and shard_name(7) == "rank-007.safetensors"
    assert is_id(draw_id()) and draw_id() != draw_id() and not is_id("0" * 15) and not is_id("G" * 16)
