"""``run.export``: a script's model for other programs, from ranks that hold parts of it."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import shoal
from shoal.testing.ranks import run_on_ranks

LOSS = nn.CrossEntropyLoss()
INPUTS = torch.arange(24.0).reshape(3, 8) / 24


class Tied(nn.Module):
    """A weight of two layers, a buffer that checkpoints have and one that they have not."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(8), nn.LayerNorm(8)
        self.second.weight = self.first.weight
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2)))
        self.drop, self.out = nn.Dropout(0.5), nn.Linear(8, 3)
        self.register_buffer("kept", torch.full((8,), 2.0))
        self.register_buffer("made", torch.full((8,), 3.0), persistent=False)

    def forward(self, x):
        return self.out(self.drop(self.second(self.blocks(self.first(x * self.kept))) + self.made))


def export(world, folder, plan, formats):
    """Train a few steps, and write every format; the run goes on."""
    data = [(torch.full((8,), index / 32), index % 3) for index in range(32)]
    with shoal.Run(plan=plan, seed=3, world=world) as run:
        model = Tied()
        loader = run.loader(data, global_batch=8)
        model, _ = run.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss=LOSS)
        for batch in loader.steps(2):
            run.step(batch)
        drawn = torch.get_rng_state()
        for format in formats:
            run.export(f"{folder}/{format}", format=format, plain=Tied)
        # What the first rank drew to build a model of its own is nothing that other ranks know of.
        assert torch.equal(torch.get_rng_state(), drawn)
        for path, said in (("none/out", "there is no folder"), (format, "already exists")):
            with pytest.raises(shoal.ShoalError, match=said if run.is_main else "failed on the first rank"):
                run.export(f"{folder}/{path}", format="safetensors")
        for batch in loader.steps(1):
            run.step(batch)


def expected_scores(folder):
    plain = Tied()
    loaded = load_file(folder / "safetensors" / "model.safetensors")
    assert "first.weight" in loaded and "second.weight" not in loaded
    shoal.load_weights(plain, folder / "safetensors")
    assert torch.equal(plain.out.weight, loaded["out.weight"]) and plain.second.weight is plain.first.weight
    return plain.eval()(INPUTS)


def test_ranks_with_shards_write_one_program_with_the_whole_weights(tmp_path):
    run_on_ranks(export, 2, str(tmp_path), "dp=2 zero=3", ["safetensors", "torch-export"], deadline_seconds=60.0)
    found = torch.export.load(tmp_path / "torch-export" / "model.pt2").module()(INPUTS)
    assert torch.allclose(found, expected_scores(tmp_path), rtol=0, atol=1e-6)


@pytest.mark.soak
@pytest.mark.parametrize("plan", ["dp=2", "dp=2 zero=1", "tp=2", "pp=2 microbatches=2"])
def test_every_plan_and_format(tmp_path, plan):
    formats = ["safetensors", "torch-export", "onnx"]
    run_on_ranks(export, 2, str(tmp_path), plan, formats, deadline_seconds=120.0)
    wanted = expected_scores(tmp_path)
    program = torch.export.load(tmp_path / "torch-export" / "model.pt2").module()(INPUTS)
    assert torch.allclose(program, wanted, rtol=0, atol=1e-6)
    import onnxruntime

    session = onnxruntime.InferenceSession(tmp_path / "onnx" / "model.onnx", providers=["CPUExecutionProvider"])
    (scores,) = session.run(None, {session.get_inputs()[0].name: INPUTS.numpy()})
    assert torch.allclose(torch.from_numpy(scores), wanted, rtol=0, atol=1e-5)


def export_llama(world, folder, plan):
    from transformers import LlamaConfig, LlamaForCausalLM

    texts = [{"input_ids": (tokens := (torch.arange(6) + index) % 32), "labels": tokens} for index in range(16)]
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    with shoal.Run(plan=plan, seed=3, world=world) as run:
        model = LlamaForCausalLM(LlamaConfig(vocab_size=32, use_cache=False, tie_word_embeddings=True, **sizes))
        loader = run.loader(texts, global_batch=8)
        run.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        for batch in loader.steps(2):
            run.step(batch)
        run.export(f"{folder}/hf", format="hf")
        return run.state_dict()


@pytest.mark.soak
@pytest.mark.parametrize("plan", ["dp=2 zero=3", "tp=2"])
def test_a_model_of_transformers_needs_no_plain_one(tmp_path, plan):
    from transformers import AutoModelForCausalLM

    weights = run_on_ranks(export_llama, 2, str(tmp_path), plan, deadline_seconds=120.0)[0]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", local_files_only=True)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert all(torch.equal(one, weights[name]) for name, one in loaded.state_dict().items())
