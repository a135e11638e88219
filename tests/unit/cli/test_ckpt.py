"""``shoal ckpt``: what it prints, what it writes for programs, and its exit codes."""

import json

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from shoal.checkpoint.commit import write_checkpoint
from shoal.checkpoint.pieces import as_blob
from shoal.cli.ckpt import app
from shoal.core.errors import RequestError, RunError
from support.checkpoint.forged import make


def run(*arguments):
    """Exit code, stdout, and the error that the command line would print."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        assert isinstance(result.exception, RequestError | RunError), result.exception
        return result.exception.exit_code, result.stdout, str(result.exception)
    return result.exit_code, result.stdout, ""


@pytest.fixture
def run_dir(tmp_path):
    """A run directory with two checkpoints and a recipe."""
    root = tmp_path / "run" / "checkpoints"
    make(root, 10)
    make(root, 20)
    (tmp_path / "run" / "recipe.toml").write_text('[model]\nname = "mlp"\nlayers = 2\n')
    return tmp_path / "run"


def test_show_lists_a_run_and_describes_one(run_dir, tmp_path):
    code, out, _ = run("show", run_dir, "--json", tmp_path / "out.json")
    assert code == 0 and "step-00000010" in out and "step-00000020" in out
    listed = json.loads((tmp_path / "out.json").read_text())["checkpoints"]
    assert [entry["step"] for entry in listed] == [20, 10] and all(entry["whole"] for entry in listed)
    code, out, _ = run("show", run_dir / "checkpoints" / "step-00000010")
    assert code == 0 and "weights/a" in out and "[300, 2]" in out and "dp=2" in out and "'seed': 10" in out


def test_show_says_how_a_tensor_is_cut(run_dir, tmp_path):
    code, out, _ = run("show", run_dir / "checkpoints" / "step-00000010", "--json", tmp_path / "out.json")
    [line] = [line for line in out.splitlines() if line.startswith("optimizer/a/cut")]
    assert code == 0 and "[8, 6]" in line and "dim 1 in 2" in line and "whole" in out
    [listed] = json.loads((tmp_path / "out.json").read_text())["checkpoints"]
    assert [piece["start"] for piece in listed["tensors"]["optimizer/a/cut"]["pieces"]] == [[0, 0], [0, 3]]


def test_show_and_verify_say_no_when_one_is_torn(run_dir, tmp_path):
    (run_dir / "checkpoints" / "step-00000020" / "rank-000.safetensors").unlink()
    for verb in ("show", "verify"):
        code, out, _ = run(verb, run_dir, "--json", tmp_path / "out.json")
        assert code == 1 and "not whole" in out and "rank-000.safetensors is missing" in out
        assert [entry["whole"] for entry in json.loads((tmp_path / "out.json").read_text())["checkpoints"]] == [
            False,
            True,
        ]
        assert run(verb, run_dir / "checkpoints" / "step-00000010")[0] == 0
        assert run(verb, run_dir / "checkpoints" / "step-00000020")[0] == 1


def test_verify_reads_every_byte(run_dir, tmp_path):
    assert run("verify", run_dir)[0] == 0
    shard = run_dir / "checkpoints" / "step-00000010" / "rank-001.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert run("show", run_dir)[0] == 0
    code, out, _ = run("verify", run_dir, "--json", tmp_path / "out.json")
    assert code == 1 and "rank-001.safetensors: bytes" in out
    assert json.loads((tmp_path / "out.json").read_text())["checkpoints"][1]["problems"]


def test_diff_names_what_changed(run_dir, tmp_path):
    first, second = run_dir / "checkpoints" / "step-00000010", run_dir / "checkpoints" / "step-00000020"
    code, out, _ = run("diff", first, run_dir, "--json", tmp_path / "out.json", "--top", 1)
    assert code == 0 and "different" in out and "values that differ: seed" in out and "more; see --top" in out
    result = json.loads((tmp_path / "out.json").read_text())
    assert not result["same"] and result["second"] == str(second)
    assert "weights/a" in [tensor["name"] for tensor in result["changed"]]
    code, out, _ = run("diff", first, first)
    assert code == 0 and "the same, bit for bit" in out
    (first / "manifest.json").unlink()
    code, _, error = run("diff", first, second)
    assert code == 1 and "manifest.json is missing" in error


def test_export_uses_the_newest_whole_checkpoint_of_a_run(run_dir, tmp_path):
    (run_dir / "checkpoints" / "step-00000020" / "manifest.json").unlink()
    code, out, _ = run("export", run_dir, "--json", tmp_path / "out.json")
    folder = run_dir / "export-step-00000010"
    assert code == 0 and "exported step 10" in out
    assert json.loads((tmp_path / "out.json").read_text())["folder"] == str(folder)
    assert set(load_file(folder / "model.safetensors")) == {"a", "empty"}
    assert json.loads((folder / "config.json").read_text())["layers"] == 2
    code, _, error = run("export", run_dir)
    assert code == 2 and "already exists" in error
    assert run("export", run_dir, "--to", tmp_path / "elsewhere")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "nowhere"], "no such folder"),
        (["verify", "empty"], "no checkpoint in"),
        (["diff", "nowhere", "nowhere"], "no such folder"),
        (["export", "nowhere"], "no such folder"),
        (["export", "lonely"], "--to DIR"),
        (["export", "lonely", "--format", "program"], "no recipe is beside"),
        (["export", "lonely", "--format", "safetensor"], "did you mean 'safetensors'?"),
        (["show", "lonely", "--json", "no/such/folder.json"], "--json"),
    ],
    ids=" ".join,
)
def test_a_wrong_request_is_one_message_and_exit_2(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    make(tmp_path, 1).rename(tmp_path / "lonely")
    code, _, error = run(*arguments)
    assert code == 2 and message in error


def test_a_checkpoint_alone_can_be_exported_where_one_says(tmp_path):
    path = write_checkpoint(tmp_path / "c", step=1, ranks=[{"weights/w": as_blob(torch.ones(2))}], values={})
    assert run("export", path, "--to", tmp_path / "out")[0] == 0
    assert load_file(tmp_path / "out" / "model.safetensors")["w"].tolist() == [1.0, 1.0]


def test_a_model_of_a_script_is_exported_by_the_script_and_its_weights_here(run_dir):
    (run_dir / "recipe.toml").unlink()
    code, _, error = run("export", run_dir, "--format", "onnx")
    assert code == 2 and "no recipe is beside" in error and 'calls run.export(path, format="onnx")' in error
    code, out, _ = run("export", run_dir)
    assert code == 0 and (run_dir / "export-step-00000020" / "model.safetensors").is_file(), out
