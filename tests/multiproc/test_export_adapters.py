"""The adapters of a run as a folder of peft: loaded onto the base model by peft itself, they give the trained model."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from shoal.trainer.build import load_run

PARTS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, norm=False):
        super().__init__()
        self.first = nn.Linear(3, 8)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.last = nn.Linear(8, 4)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x))))

class Shell(nn.Module):
    def __init__(self):
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification
        sizes = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16)
        self.net = BertForSequenceClassification(BertConfig(vocab_size=32, num_labels=4, **sizes))

    def forward(self, x):
        return self.net(input_ids=x).logits

class Pairs:
    def __init__(self, words=False):
        self.words = words

    def __len__(self):
        return 32

    def __getitem__(self, number):
        return torch.arange(3) + number % 8 if self.words else torch.arange(3.0) - number, number % 4
"""
TABLES = """
[model]
build = "parts:{build}"
{model}
[data]
build = "parts:Pairs"
{data}
[train]
steps = 3
global_batch = 8
[optim]
lr = 0.05
"""


def write_recipe(folder, *, build="Net", model="", data=""):
    (folder / "parts.py").write_text(PARTS)
    (folder / "own.toml").write_text(TABLES.format(build=build, model=model, data=data))


@pytest.mark.parametrize(
    ("plan", "bias"),
    [
        pytest.param("dp=2 zero=3", "lora_only", marks=pytest.mark.soak),
        pytest.param("dp=2", "none", marks=pytest.mark.soak),
        pytest.param("dp=2 zero=3", "all", marks=pytest.mark.soak),
        pytest.param("tp=2", "none", marks=pytest.mark.soak),
    ],
)
def test_adapters_of_any_plan_are_loaded_by_peft_onto_the_base_model(shoal, tmp_path, monkeypatch, plan, bias):
    peft = pytest.importorskip("peft")
    monkeypatch.syspath_prepend(tmp_path)
    lora = f'init = "base.safetensors"\nlora = {{ rank = 2, targets = ["first", "last"], bias = "{bias}" }}'
    write_recipe(tmp_path, model=lora)
    space = {}
    exec(PARTS, space)
    base = space["Net"]()
    save_file({name: tensor.clone() for name, tensor in base.state_dict().items()}, tmp_path / "base.safetensors")
    shoal.run("train", "own.toml", "--plan", plan, "--run-dir", "run")
    said = shoal.run("ckpt", "export", "run", "--to", "adapters", "--format", "peft", "--json", "told.json")
    assert "peft run on the same inputs" in said.stdout
    assert json.loads((tmp_path / "told.json").read_text())["errors"]["peft"] < 1e-5
    names = {path.name for path in (tmp_path / "adapters").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors"}
    held = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    assert "base_model.model.last.lora_A.weight" in held and not any("base_layer.weight" in name for name in held)
    inputs = torch.randn(5, 3)
    with torch.no_grad():
        before = base(inputs)
        found = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapters")).eval()(inputs)
        monkeypatch.chdir(tmp_path)
        trained = load_run(tmp_path / "run").model(inputs)
    assert not torch.allclose(found, before) and torch.allclose(found, trained, atol=1e-6)


@pytest.mark.soak
def test_adapters_of_a_model_of_transformers_are_for_that_model_without_its_shell(shoal, tmp_path, monkeypatch):
    peft = pytest.importorskip("peft")
    monkeypatch.syspath_prepend(tmp_path)
    write_recipe(
        tmp_path,
        build="Shell",
        model='lora = { targets = ["net.bert.pooler.dense", "query"] }',
        data="args.words = true",
    )
    shoal.run("train", "own.toml", "--plan", "dp=2", "--run-dir", "run")
    shoal.run("ckpt", "export", "run", "--to", "adapters", "--format", "peft")
    monkeypatch.chdir(tmp_path)
    trained, words = load_run(tmp_path / "run").model, torch.arange(6).reshape(2, 3)
    kept = {
        name.removeprefix("net.").replace(".base_layer.", "."): one
        for name, one in trained.state_dict().items()
        if "lora_" not in name
    }
    import parts

    base = parts.Shell().net.eval()
    base.load_state_dict(kept)
    loaded = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapters")).eval()
    with torch.no_grad():
        assert torch.allclose(loaded(input_ids=words).logits, trained(words), atol=1e-6)


@pytest.mark.soak
def test_what_is_no_adapter_is_refused(shoal, tmp_path):
    write_recipe(tmp_path)
    shoal.run("train", "own.toml", "--run-dir", "plain")
    refused = shoal.run("ckpt", "export", "plain", "--to", "none", "--format", "peft", expect=2)
    assert "plain has none; use --format hf or safetensors" in refused.stderr
    write_recipe(tmp_path, model='args.norm = true\nlora = { targets = ["last"] }')
    shoal.run("train", "own.toml", "--run-dir", "moved")
    refused = shoal.run("ckpt", "export", "moved", "--to", "none", "--format", "peft", expect=2)
    assert "training changed 'norm.running_mean', which is no part of an adapter" in refused.stderr
    assert not (tmp_path / "none").exists()
