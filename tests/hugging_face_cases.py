"""Configs of small Hugging Face models, from which unmodified ones are built without a download. Import it after importorskip."""

import transformers

WIDTH, HEADS, VOCAB = 32, 4, 97


def gpt2_config(**changes):
    sizes = {"n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "n_positions": 32}
    return transformers.GPT2Config(**{"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0, **sizes, **changes})


def llama_config(**changes):
    return transformers.LlamaConfig(**{**_sizes(), "num_key_value_heads": 2, **changes})


def bert_config(**changes):
    return transformers.BertConfig(**{**_sizes(), **changes})


def _sizes():
    return {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "max_position_embeddings": 32,
    }
