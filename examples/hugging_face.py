"""An unmodified Hugging Face model under a recipe: `cd examples && shoal train hugging_face.toml --plan "tp=2 sp=true"`.

Needs the extra shoal[hf]. Nothing is downloaded: the model is built from a config. To start from pretrained weights, return
`GPT2LMHeadModel.from_pretrained("gpt2")` in its place; every plan starts from the same ones.
"""

from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from shoal.data.spec import DataSpec


def build(spec: DataSpec, layers: int, hidden: int, heads: int) -> nn.Module:
    config = GPT2Config(
        vocab_size=spec.vocab,
        n_positions=spec.sequence,
        n_embd=hidden,
        n_layer=layers,
        n_head=heads,
        attn_pdrop=0.0,  # Dropout inside attention is the one thing that cp refuses.
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)
