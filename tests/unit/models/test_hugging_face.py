"""The shipped gpt as a Llama of transformers: the same function, and loaded back by ``from_pretrained``."""

import pytest
import torch
from torch import nn

from shoal.core.errors import RequestError
from shoal.models.config import GptConfig, LoraConfig
from shoal.models.gpt import Gpt
from shoal.models.hugging_face import as_transformers, load_back
from shoal.models.lora import add_adapters, merge_adapters

torch.set_num_threads(1)


@pytest.mark.parametrize("tied", [False, True])
def test_a_gpt_is_a_llama_that_from_pretrained_loads(tmp_path, tied):
    torch.manual_seed(0)
    model = Gpt(GptConfig(layers=2, hidden=32, heads=4, kv_heads=2, tied=tied), vocab=40, sequence=12).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    tokens = torch.randint(0, 40, (3, 12))
    llama = as_transformers(model)
    llama.save_pretrained(tmp_path)
    with torch.no_grad():
        expected, found = model(tokens), load_back(tmp_path, llama)(tokens).logits
    assert float((expected - found).norm() / expected.norm()) < 1e-6


def test_what_is_no_model_of_transformers_is_said():
    with pytest.raises(RequestError, match="Sequential is no model of transformers"):
        as_transformers(nn.Sequential(nn.Linear(1, 1)))


def test_adapters_are_merged_into_the_layers_that_they_adapt():
    torch.manual_seed(0)
    plain = Gpt(GptConfig(layers=1, hidden=16, heads=2), vocab=20, sequence=8)
    names = set(plain.state_dict())
    model = add_adapters(plain, LoraConfig(rank=2, targets=("query", "down"))).eval()
    assert {name for name, one in model.named_parameters() if one.requires_grad} == {
        name for name, _ in model.named_parameters() if ".lora_" in name
    }
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            nn.init.normal_(parameter)
    tokens = torch.randint(0, 20, (2, 8))
    with torch.no_grad():
        expected = model(tokens)
        assert merge_adapters(model) == 2 and set(model.state_dict()) == names
        assert float((expected - model(tokens)).norm() / expected.norm()) < 1e-6


def test_layers_that_are_not_there_get_no_adapter():
    with pytest.raises(RequestError, match="the linear layers of the model end in"):
        add_adapters(nn.Sequential(nn.Linear(2, 2)), LoraConfig(targets=("nothing",)))
