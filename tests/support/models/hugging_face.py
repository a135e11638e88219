"""Configs of small Hugging Face models, from which unmodified ones are built without a download. Import it after importorskip."""

import transformers
from torch import nn

WIDTH, HEADS, VOCAB = 32, 4, 97


def gpt2_config(**changes):
    sizes = {"n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "n_positions": 32}
    return transformers.GPT2Config(**{"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0, **sizes, **changes})


def llama_config(**changes):
    return transformers.LlamaConfig(**{**_sizes(), "num_key_value_heads": 2, **changes})


def bert_config(**changes):
    return transformers.BertConfig(**{**_sizes(), **changes})


def t5_config(**changes):
    sizes = {"d_model": WIDTH, "d_kv": WIDTH // HEADS, "d_ff": 48, "num_layers": 2, "num_heads": HEADS}
    return transformers.T5Config(**{"vocab_size": VOCAB, "decoder_start_token_id": 0, **sizes, **changes})


class Pairs(nn.Module):
    """An encoder-decoder of Hugging Face, called with a source and a target by place."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, source, target):
        return self.model(input_ids=source, decoder_input_ids=target).logits


def build_causal(spec, family, **changes):
    """For recipes: a decoder of any family, by the name that its classes begin with."""
    sizes = {**_sizes(), "use_cache": False, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    config = getattr(transformers, f"{family}Config")(**{**sizes, **changes})
    return getattr(transformers, f"{family}ForCausalLM")(config)


def build_t5(spec):
    """For recipes."""
    return Pairs(transformers.T5ForConditionalGeneration(t5_config(use_cache=False)))


def _sizes():
    return {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "max_position_embeddings": 32,
    }
