"""A trained model as one of ``transformers``, in a folder that ``from_pretrained`` loads.

A model of transformers writes itself. The shipped gpt is, in every operation, a Llama (RMSNorm before attention and before
SwiGLU, rotary positions by halves, grouped-query attention, no biases), so its weights are written under Llama's names. No other
shipped model is one of transformers, and that is said.
"""

import copy
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.errors import RequestError
from shoal.models.gpt import Gpt
from shoal.models.transformer import ROTARY_BASE

# A block of the shipped gpt, and what Llama calls its parts.
_BLOCK = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention_norm": "input_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}
_ENDS = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}


def require_transformers() -> Any:
    """The library.

    Raises:
        RequestError: it is not installed; says how to install it.
    """
    try:
        import transformers
    except ImportError as error:
        raise RequestError(
            f"the format hf needs transformers, which is not installed ({error}); install it: pip install 'shoal[hf]'"
        ) from error
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    return transformers


def as_transformers(model: nn.Module) -> Any:
    """The model of transformers that a trained module is, or holds; the shipped gpt as a Llama with the same weights.

    Raises:
        RequestError: it is none; says what to export instead.
    """
    transformers = require_transformers()
    if isinstance(model, transformers.PreTrainedModel):
        return model
    if isinstance(model, Gpt):
        return _as_llama(model, transformers)
    if (held := held_transformers(model)) is not None:
        return held[1]
    raise RequestError(
        f"{type(model).__name__} is no model of transformers, and none there has its architecture; use the format "
        "safetensors, torch-export or onnx"
    )


def build_again(model: nn.Module) -> Callable[[], nn.Module] | None:
    """Makes a model of transformers of the same class and config, with weights of its own; None for any other model."""
    library = sys.modules.get("transformers")
    if library is None or not isinstance(model, library.PreTrainedModel):
        return None
    known: Any = model

    def build() -> nn.Module:
        made: nn.Module = type(known)(copy.deepcopy(known.config))
        if known.can_generate():
            vars(made)["generation_config"] = copy.deepcopy(known.generation_config)
        return made

    return build


def held_transformers(model: nn.Module) -> tuple[str, nn.Module] | None:
    """The model of transformers that a module of the user's own is a shell around, and what it is called there."""
    transformers = require_transformers()
    inside = [(name, one) for name, one in model.named_children() if isinstance(one, transformers.PreTrainedModel)]
    if len(inside) == 1 and len(list(inside[0][1].parameters())) == len(list(model.parameters())):
        return inside[0]
    return None


def logits_of(output: Any) -> Tensor:
    """The scores of an output, whatever a model wraps them in.

    Raises:
        RequestError: none are found; says by which names they are.
    """
    for key in ("logits", "last_hidden_state"):
        if (found := output.get(key) if isinstance(output, Mapping) else getattr(output, key, None)) is not None:
            output = found
            break
    if isinstance(output, tuple | list):
        output = output[0]
    if not isinstance(output, Tensor):
        raise RequestError(
            f"the model returns a {type(output).__name__}, and an export compares scores; return a tensor, a tuple that begins "
            "with one, or a dict or an object with logits"
        )
    return output


def load_back(folder: Path, like: Any) -> Any:
    """What ``from_pretrained`` makes of a folder."""
    return type(like).from_pretrained(folder, local_files_only=True).eval()


def _as_llama(model: Gpt, transformers: Any) -> Any:
    first: Any = model.blocks[0]
    weight = model.embedding.weight
    config = transformers.LlamaConfig(
        vocab_size=weight.shape[0],
        hidden_size=weight.shape[1],
        intermediate_size=first.feed_forward.gate.out_features,
        num_hidden_layers=len(model.blocks),
        num_attention_heads=first.attention.heads,
        num_key_value_heads=first.attention.kv_heads,
        max_position_embeddings=model.sequence,
        # What nn.RMSNorm adds where nothing is said.
        rms_norm_eps=torch.finfo(weight.dtype).eps,
        rope_theta=ROTARY_BASE,
        tie_word_embeddings=model.head.weight is weight,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        dtype=weight.dtype,
    )
    llama = transformers.LlamaForCausalLM(config).to(weight.dtype)
    llama.load_state_dict({_llama_name(name): tensor for name, tensor in model.state_dict().items()})
    return llama.eval()


def _llama_name(name: str) -> str:
    if name in _ENDS:
        return _ENDS[name]
    _, number, rest = name.split(".", 2)
    part, _, kind = rest.rpartition(".")
    return f"model.layers.{number}.{_BLOCK[part]}.{kind}"
