"""The whole way: a recipe is trained, its checkpoints are compared, and the run is exported for other programs."""

import csv
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shoal.data.prepare import prepare_rows
from shoal.data.rawrows import load_preparation
from shoal.trainer.build import load_run


@pytest.mark.soak
def test_a_trained_run_is_exported_as_a_program_too(shoal, tiny, tmp_path):
    shoal.run("train", tiny, "--run-dir", "run", "--set", "train.steps=4", "--set", "checkpoint.every=2")
    shoal.run("ckpt", "export", "run", "--to", "new", "--format", "all")
    shoal.run("ckpt", "export", "run/checkpoints/step-00000002", "--to", "old", "--format", "program")
    shoal.run("ckpt", "diff", "run/checkpoints/step-00000002", "run", "--json", "diff.json")
    assert json.loads((tmp_path / "diff.json").read_text())["changed"]
    tokens = torch.randint(0, 256, (3, 16))
    weights = load_file(tmp_path / "new" / "model.safetensors")
    programs = {name: torch.export.load(tmp_path / name / "model.pt2") for name in ("old", "new")}
    assert weights and all(torch.equal(programs["new"].state_dict[key], tensor) for key, tensor in weights.items())
    outputs = {name: program.module()(tokens) for name, program in programs.items()}
    assert outputs["new"].shape[0] == 3 and not torch.equal(outputs["old"], outputs["new"])


@pytest.mark.soak
@pytest.mark.parametrize("plan", ["dp=2", "dp=2 zero=3", "tp=2", "pp=2 microbatches=2"])
def test_every_format_gives_what_the_trained_model_gives_from_a_checkpoint_of_any_plan(shoal, tiny, tmp_path, plan):
    shoal.run("train", tiny, "--plan", plan, "--run-dir", "run", "--set", "train.steps=2")
    for format in ("hf", "torch-export", "onnx"):
        shoal.run("ckpt", "export", "run", "--to", format, "--format", format, "--json", f"{format}.json")
        assert json.loads((tmp_path / f"{format}.json").read_text())["errors"][format] < 1e-5


@pytest.mark.soak
def test_averaged_weights_are_exported_from_a_checkpoint_of_any_plan(shoal, tiny, tmp_path):
    settings = ("train.steps=2", "checkpoint.every=1", 'callbacks=[{name="ema",decay=0.9,start=1}]')
    words = [word for setting in settings for word in ("--set", setting)]
    shoal.run("train", tiny, "--plan", "dp=2 zero=3", "--run-dir", "run", *words)
    shoal.run("ckpt", "export", "run/checkpoints/step-00000001", "--to", "first")
    shoal.run("ckpt", "export", "run", "--to", "second")
    said = shoal.run("ckpt", "export", "run", "--to", "averaged", "--weights", "ema", "--format", "all")
    assert "averaged tensors" in said.stdout
    first, second, averaged = (
        load_file(tmp_path / name / "model.safetensors") for name in ("first", "second", "averaged")
    )
    assert averaged.keys() == second.keys()
    for name, one in averaged.items():
        assert torch.equal(one, first[name] * 0.9 + second[name] * (1.0 - 0.9)), name
    shoal.run("train", tiny, "--run-dir", "plain", "--set", "train.steps=1")
    refused = shoal.run("ckpt", "export", "plain", "--to", "none", "--weights", "ema", expect=2)
    assert "holds no averaged weights" in refused.stderr and not (tmp_path / "none").exists()


@pytest.mark.soak
def test_an_export_prepares_raw_rows_as_the_run_did(shoal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = Path(__file__).parents[2] / "recipes" / "table.toml"
    pumps = recipe.parent / "data" / "pumps.csv"
    (tmp_path / "pumps.csv").write_bytes(pumps.read_bytes())
    settings = ("--set", "data.path=pumps.csv", "--set", "train.steps=5", "--set", "checkpoint.every=5")
    shoal.run("train", recipe, "--plan", "dp=1", "--run-dir", "run", *settings)
    said = shoal.run("ckpt", "export", "run", "--to", "out", "--format", "torch-export", "--json", "out.json")
    assert "prepares rows as training did" in said.stdout
    # Neither the run nor its data is there for whoever serves; only the raw rows of a client.
    with pumps.open() as file:
        lines = list(csv.DictReader(file))
    run = load_run(tmp_path / "run")
    scores = {}
    for name, split in prepare_rows(run.recipe.data.model_copy(update={"path": str(pumps)})).splits.items():
        scores[name] = run.model(torch.from_numpy(split.inputs[""]))
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "pumps.csv").unlink()
    kinds = {"temperature": float, "pressure": float, "flow": float}
    rows = [{name: kinds.get(name, str)(line[name]) if line[name] else None for name in RAW} for line in lines]
    inputs = load_preparation(tmp_path / "out" / "prepare").prepare_values(rows)[""]
    found = torch.export.load(tmp_path / "out" / "model.pt2").module()(torch.from_numpy(inputs))
    assert sum(map(len, scores.values())) == len(found) == 360
    assert torch.allclose(
        torch.cat(list(scores.values())).sort(dim=0).values, found.sort(dim=0).values, rtol=0, atol=1e-5
    )


RAW = ("temperature", "pressure", "flow", "kind", "when")
PARTS = """
import torch
from torch import nn

class ByKeywords(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, *, x, scale):
        return {"logits": self.layer(x) * scale}

class Pairs:
    def __len__(self):
        return 32

    def __getitem__(self, number):
        return {"scale": torch.ones(1) * number, "x": torch.arange(3.0) - number}, number % 4

def loss(output, targets):
    return nn.functional.cross_entropy(output["logits"], targets)

def llama():
    from transformers import LlamaConfig, LlamaForCausalLM
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, use_cache=False, **sizes))

class Texts(Pairs):
    def __getitem__(self, number):
        tokens = (torch.arange(6) + number) % 32
        return {"input_ids": tokens, "labels": tokens}
"""


@pytest.mark.soak
def test_a_model_with_keywords_and_dicts_is_exported_too(shoal, tmp_path):
    (tmp_path / "parts.py").write_text(PARTS)
    tables = (
        '[model]\nbuild = "parts:ByKeywords"\nloss = "parts:loss"\n[data]\nbuild = "parts:Pairs"\n[train]\nsteps = 2\n'
    )
    (tmp_path / "own.toml").write_text(tables)
    shoal.run("train", "own.toml", "--plan", "dp=2", "--run-dir", "run", "--set", "train.global_batch=8")
    for format in ("torch-export", "onnx"):
        shoal.run("ckpt", "export", "run", "--to", format, "--format", format, "--json", f"{format}.json")
        assert json.loads((tmp_path / f"{format}.json").read_text())["errors"][format] < 1e-5
    session = pytest.importorskip("onnxruntime").InferenceSession(tmp_path / "onnx" / "model.onnx")
    assert [one.name for one in session.get_inputs()] == ["scale", "x"]


@pytest.mark.soak
def test_who_runs_a_model_of_transformers_needs_no_labels(shoal, tmp_path):
    pytest.importorskip("transformers")
    runtime = pytest.importorskip("onnxruntime")
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "own.toml").write_text(
        '[model]\nbuild = "parts:llama"\n[data]\nbuild = "parts:Texts"\n[train]\nsteps = 2\nglobal_batch = 8\n'
    )
    shoal.run("train", "own.toml", "--plan", "dp=2", "--run-dir", "run")
    for format in ("torch-export", "onnx"):
        shoal.run("ckpt", "export", "run", "--to", format, "--format", format)
    tokens = torch.arange(6).repeat(3, 1)
    session = runtime.InferenceSession(tmp_path / "onnx" / "model.onnx")
    assert [one.name for one in session.get_inputs()] == ["input_ids"]
    (scores,) = session.run(["logits"], {"input_ids": tokens.numpy()})
    program = torch.export.load(tmp_path / "torch-export" / "model.pt2").module()
    assert torch.allclose(torch.from_numpy(scores), program(tokens), atol=1e-5)
