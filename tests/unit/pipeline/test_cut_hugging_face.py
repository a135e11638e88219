"""Unmodified Hugging Face models, built from a tiny config, cut into stages: bit for bit what they put out whole."""

import copy

import pytest
import torch

from shoal.core.errors import RequestError
from shoal.parallel.analysis.analyse import analyse_module
from shoal.parallel.analysis.structure import ParallelConfig
from shoal.pipeline.cut import StagedModule
from shoal.pipeline.units import find_units

transformers = pytest.importorskip("transformers")

from support.models.hugging_face import VOCAB, bert_config, gpt2_config, llama_config  # noqa: E402  # only where transformers is there

L = 12


def gpt2():
    return transformers.GPT2LMHeadModel(gpt2_config(n_layer=3))


def llama():
    return transformers.LlamaForCausalLM(llama_config(num_hidden_layers=3))


def bert():
    return transformers.BertForMaskedLM(bert_config(num_hidden_layers=3))


def ids(seed):
    return (torch.randint(1, VOCAB, (2, L), generator=torch.Generator().manual_seed(seed)),)


def units_of(model):
    return find_units(model, ids(0), analyse_module(model, ids(0), ParallelConfig()))


def stages_alone(whole, units, starts):
    """The scores, each stage computed by a module that has let go of all others."""
    received = ()
    for stage in range(len(starts)):
        chain = StagedModule(copy.deepcopy(whole), units, starts)
        chain.settle(ids(0))
        own = chain.keep({stage})
        assert 0 < sum(parameter.numel() for parameter in own.values()) < sum(p.numel() for p in whole.parameters())
        received = chain.run(stage, ids(1), received)
    return received.logits


@pytest.mark.parametrize(
    ("make", "places"),
    [
        (gpt2, ("transformer.h.1", "transformer.ln_f")),
        (llama, ("model.layers.1", "model.layers.2", "lm_head")),
        (bert, ("bert.encoder.layer.0", "bert.encoder.layer.2", "cls")),
    ],
)
def test_stages_on_their_own_give_what_the_whole_gives(make, places):
    torch.manual_seed(0)
    whole = make().eval()
    units = units_of(whole)
    paths = [unit.path for unit in units]
    with torch.no_grad():
        expected = whole(*ids(1)).logits
        found = stages_alone(whole, units, [0, *(paths.index(place) for place in places)])
    assert torch.equal(found, expected)


def test_gpt2_cannot_be_cut_between_its_two_embeddings():
    """Their sum is taken outside both, so that the words' part does not go through the positions' call."""
    model = gpt2()
    units = units_of(model)
    assert [unit.path for unit in units[:2]] == ["transformer.wte", "transformer.wpe"]
    with pytest.raises(RequestError, match=r"stage 1, from 'transformer.wpe' on"):
        StagedModule(model, units, [0, 1]).settle(ids(0))


@pytest.mark.parametrize(
    ("make", "place", "first", "second"),
    [
        (gpt2, "transformer.h.2", "transformer.wte.weight", "lm_head.weight"),
        # Inside the unit, so that the name goes through a module that is not there.
        (bert, "bert.encoder.layer.2", "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
    ],
)
def test_a_tied_weight_keeps_its_first_name_where_only_its_second_use_is(make, place, first, second):
    torch.manual_seed(0)
    whole = make()
    units = units_of(whole)
    chain = StagedModule(copy.deepcopy(whole), units, [0, [unit.path for unit in units].index(place)])
    chain.settle(ids(0))
    own = chain.keep({1})
    assert first in own and second not in own
    assert [name for name, _ in chain.model.named_parameters()] == [*own]
    assert [*own] == [name for name, _ in whole.named_parameters() if name in own]
    saved = chain.model.state_dict()
    assert {first, second} <= saved.keys() < whole.state_dict().keys()
    assert chain.model.get_parameter(second) is own[first] is chain.model.get_parameter(first)
