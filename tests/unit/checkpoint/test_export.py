"""Weights for other programs: read back by those programs."""

import json
import os

import pytest
import torch
from safetensors import safe_open
from torch import nn

from shoal.checkpoint.commit import write_checkpoint
from shoal.checkpoint.export.program import compare_outputs, run_onnx, write_onnx, write_program
from shoal.checkpoint.export.weights import new_folder, read_weights, write_weights
from shoal.checkpoint.pieces import as_blob
from shoal.core.errors import RequestError, RunError

torch.set_num_threads(1)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2)).eval()


@pytest.fixture
def checkpoint(tmp_path, model):
    weights = {f"weights/{name}": as_blob(tensor) for name, tensor in model.state_dict().items()}
    state = {"optimizer/0.weight/exp_avg": as_blob(torch.ones(8, 4))}
    return write_checkpoint(tmp_path / "checkpoints", step=3, ranks=[weights, state], values={}, plan="dp=2")


def test_the_weights_are_what_hugging_face_expects(tmp_path, checkpoint, model):
    with new_folder(tmp_path / "out") as draft:
        write_weights(read_weights(checkpoint), draft, model={"name": "mlp", "layers": 2})
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model.safetensors"]
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "shoal-mlp" and config["layers"] == 2 and config["torch_dtype"] == "float32"
    assert config["shoal"]["step"] == 3


def test_only_weights_are_read(checkpoint):
    (checkpoint / "rank-001.safetensors").unlink()
    assert all(name.startswith("weights/") for name in read_weights(checkpoint).tensors)


def test_a_checkpoint_without_weights_is_refused(tmp_path):
    path = write_checkpoint(tmp_path, step=1, ranks=[{"a": as_blob(torch.ones(2))}], values={})
    with pytest.raises(RunError, match="holds no weights"):
        read_weights(path)


@pytest.mark.parametrize("example", [torch.randn(1, 4), torch.randn(3, 5)[:, :-1]], ids=["one sample", "a view"])
def test_the_program_gives_what_the_model_gives_for_any_number_of_samples(tmp_path, model, example):
    with new_folder(tmp_path / "out") as draft:
        write_program(model, (example,), draft)
    program = torch.export.load(tmp_path / "out" / "model.pt2").module()
    for samples in (2, 5):
        x = torch.randn(samples, 4)
        assert torch.equal(program(x), model(x))


class Unexpressible(nn.Module):
    def forward(self, x):
        return x if float(x.sum()) > 0 else x + 1


class Wordless(nn.Module):
    def forward(self, x):
        raise ValueError


@pytest.mark.parametrize("model", [Unexpressible(), Wordless()])
def test_a_model_that_cannot_be_exported_is_one_message_and_no_folder(tmp_path, model):
    with (
        pytest.raises(RunError, match=r"torch\.export cannot express this model: \w"),
        new_folder(tmp_path / "out") as draft,
    ):
        write_program(model, (torch.ones(2),), draft)
    assert os.listdir(tmp_path) == []


def test_an_export_is_there_whole_or_not_at_all(tmp_path):
    with pytest.raises(KeyError), new_folder(tmp_path / "out") as draft:
        (draft / "half").write_text("x")
        raise KeyError
    assert os.listdir(tmp_path) == []
    (tmp_path / "out").mkdir()
    with pytest.raises(RequestError, match="already exists"), new_folder(tmp_path / "out"):
        pass
    with pytest.raises(RequestError, match="there is no folder"), new_folder(tmp_path / "no" / "out"):
        pass


def test_onnx_gives_what_the_model_gives_and_another_output_is_refused(tmp_path, model):
    with new_folder(tmp_path / "out") as draft:
        path = write_onnx(model, (torch.randn(1, 4),), draft)
        x = torch.randn(5, 4)
        with torch.no_grad():
            expected = model(x)
        assert compare_outputs(expected, run_onnx(path, (x,)), what="onnx", bound=1e-5) < 1e-5
    with pytest.raises(RunError, match="differs from the trained model"):
        compare_outputs(expected, expected + 0.1, what="onnx", bound=1e-5)
