"""Weights of other programs: which tensor goes where, and files that are not what they say."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import shoal
from shoal.checkpoint.files import NotWhole
from shoal.checkpoint.foreign import read_foreign
from shoal.checkpoint.pretrained import Selection, match, open_weights
from shoal.core.errors import RequestError
from shoal.core.placement import Patch, Placement

WANTED = {("body.weight",): (2, 3), ("head.weight", "tied.weight"): (4, 2)}


def fit(given, **selection):
    return match(WANTED, given, Selection(**selection), origin="w")


def test_names_are_matched_by_prefix_by_new_beginnings_and_by_any_name_of_a_shared_tensor():
    assert fit({"body.weight": (2, 3), "tied.weight": (4, 2)}).loaded["head.weight"] == "tied.weight"
    found = fit({"m.body.weight": (2, 3), "m.head.weight": (4, 2), "other": (1,)}, prefix="m.")
    assert found.loaded == {"body.weight": "m.body.weight", "head.weight": "m.head.weight"} and not found.unexpected
    assert fit({"x.weight": (2, 3), "head.weight": (4, 2)}, rename={"x": "body"}).loaded["body.weight"] == "x.weight"
    assert fit({"weight": (2, 3)}, rename={"": "body."}, only=("body.*",)).loaded == {"body.weight": "weight"}
    part = fit({"body.weight": (2, 3), "extra": (1,)}, strict=False)
    assert (part.missing, part.unexpected) == (("head.weight",), ("extra",))
    assert fit({"body.weight": (2, 3), "head.weight": (9, 9)}, skip=("head.*",)).missing == ()


@pytest.mark.parametrize(
    ("given", "selection", "words"),
    [
        ({"body.weight": (2, 3), "extra": (1,)}, {}, ["1 tensors of the model", "'head.weight'", "'extra'", "strict"]),
        ({"m.body.weight": (2, 3), "m.head.weight": (4, 2)}, {}, ["did you mean prefix 'm.'?"]),
        ({"body.weight": (3, 2), "head.weight": (4, 2)}, {"strict": False}, ["[3, 2] there and [2, 3] in the model"]),
        ({"a": (1,)}, {"strict": False}, ["do not fit the model"]),
    ],
)
def test_names_that_do_not_match_are_in_one_message(given, selection, words):
    with pytest.raises(RequestError) as refusal:
        fit(given, **selection)
    assert all(word in str(refusal.value) for word in words)


def test_what_was_frozen_by_an_adapter_is_found_by_its_own_name():
    wanted = {("a.base_layer.weight",): (2, 2), ("a.lora_A.default.weight",): (1, 2)}
    found = match(wanted, {"a.weight": (2, 2)}, Selection(), origin="w")
    assert found.loaded == {"a.base_layer.weight": "a.weight"} and not found.missing


def test_a_part_of_a_file_is_read_and_nothing_else(tmp_path):
    whole = torch.arange(24.0).reshape(6, 4)
    save_file({"a": whole, "b": torch.ones(3)}, tmp_path / "model.safetensors")
    place = Placement(
        whole_shape=(6, 4), local_shape=(2, 2), patches=(Patch(local_start=(0, 0), whole_start=(2, 1), shape=(2, 2)),)
    )
    ((name, part),) = open_weights(tmp_path).read({"a": place})
    assert name == "a" and torch.equal(part, whole[2:4, 1:3])


def test_weights_go_into_a_plain_module_in_its_own_type(tmp_path):
    save_file({"weight": torch.full((2, 2), 1.5).bfloat16(), "bias": torch.ones(2)}, tmp_path / "w.safetensors")
    model = nn.Linear(2, 2)
    assert set(shoal.load_weights(model, tmp_path / "w.safetensors").loaded) == {"weight", "bias"}
    assert model.weight.dtype == torch.float32 and torch.equal(model.weight, torch.full((2, 2), 1.5))


def header(tree, data=b"", length=None):
    text = json.dumps(tree).encode() if not isinstance(tree, bytes) else tree
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(start, end, shape=(1,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"abc", "less than the length"),
        (header({}, length=2**62), "says that its header has"),
        (header({"a": entry(0, 4)}), "describes"),
        (header({"a": entry(0, 4), "b": entry(0, 4)}, b"1234"), "begins at byte"),
        (header({"a": entry(4, 8)}, b"12345678"), "begins at byte"),
        (header({"a": entry(0, 4, (2**40,))}, b"1234"), "in 4 bytes"),
        (header({"a": entry(0, 4, dtype="OBJ")}, b"1234"), "none of"),
        (header({"a": entry(0, 4, (-1,))}, b"1234"), "whole number"),
        (header(b'{"a":1,"a":2}'), "stands twice"),
        (header(b"[" * 100_000), "cannot be read"),
    ],
)
def test_a_hostile_header_is_refused_before_anything_is_allocated(tmp_path, data, words):
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(NotWhole, match=words):
        read_foreign(tmp_path)


def test_an_index_cannot_lead_out_of_its_folder(tmp_path):
    outside, folder = tmp_path / "outside.safetensors", tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.ones(1)}, outside)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../outside.safetensors"}}))
    with pytest.raises(NotWhole, match="no plain name"):
        read_foreign(folder)
    index.write_text(json.dumps({"weight_map": {"a": "part.safetensors"}}))
    os.symlink(outside, folder / "part.safetensors")
    with pytest.raises(NotWhole, match="leads out of"):
        read_foreign(folder)
    (folder / "part.safetensors").unlink()
    os.mkfifo(folder / "part.safetensors")
    with pytest.raises(NotWhole, match="not a regular file"):
        read_foreign(folder)


def test_pickles_are_refused_by_name(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(RequestError, match="is a pickle"):
        open_weights(tmp_path)
