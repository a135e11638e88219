"""Models of ``transformers`` from small configs, unmodified and without a download, as ``families.hugging_face:function``.

Only sizes differ from what a config gives by itself, and two kinds of dropout, which are off: inside attention, where ``cp``
refuses it, and of whole layers (Swin), which is not drawn by key.
"""

import peft
import transformers
from torch import nn

from families.data import CLASSES, SEQUENCE, VOCAB

WIDTH, HEADS, LAYERS, INNER = 32, 4, 2, 48
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 2 * SEQUENCE,
}
_BERT = {**_SIZES, "attention_probs_dropout_prob": 0.0, "pad_token_id": 0}
_CAUSAL = {**_SIZES, **_TOKENS, "attention_dropout": 0.0, "use_cache": False}
_GROUPED = {**_CAUSAL, "num_key_value_heads": 2}


class Translator(nn.Module):
    """An encoder-decoder that takes its two inputs by place."""

    def __init__(self, model, source="input_ids"):
        super().__init__()
        self.model, self._source = model, source

    def forward(self, source, target):
        return self.model(**{self._source: source}, decoder_input_ids=target, use_cache=False).logits


def bert():
    return transformers.BertForMaskedLM(transformers.BertConfig(**_BERT))


def roberta():
    return transformers.RobertaForMaskedLM(transformers.RobertaConfig(**{**_BERT, "max_position_embeddings": 40}))


def deberta():
    sizes = {**_BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}
    return transformers.DebertaV2ForMaskedLM(transformers.DebertaV2Config(**sizes, max_relative_positions=SEQUENCE))


def gpt2():
    sizes = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 2 * SEQUENCE, "vocab_size": VOCAB}
    config = transformers.GPT2Config(**sizes, **_TOKENS, attn_pdrop=0.0, use_cache=False)
    return transformers.GPT2LMHeadModel(config)


def gpt_neox():
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**_CAUSAL))


def opt():
    sizes = {**_CAUSAL, "ffn_dim": INNER, "word_embed_proj_dim": WIDTH}
    return transformers.OPTForCausalLM(transformers.OPTConfig(**sizes))


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_GROUPED))


def llama_with_lora():
    """Adapters of ``peft`` as its documentation adds them, with dropout of their own."""
    adapters = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    return peft.get_peft_model(llama(), adapters)


def mistral():
    return transformers.MistralForCausalLM(transformers.MistralConfig(**_GROUPED, sliding_window=8))


def mixtral():
    config = transformers.MixtralConfig(**_GROUPED, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
    return transformers.MixtralForCausalLM(config)


def qwen2():
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_GROUPED))


def qwen3():
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_GROUPED, head_dim=WIDTH // HEADS))


def gemma():
    return transformers.GemmaForCausalLM(transformers.GemmaConfig(**_GROUPED, head_dim=WIDTH // HEADS))


def phi():
    return transformers.PhiForCausalLM(transformers.PhiConfig(**_CAUSAL))


def mamba():
    sizes = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "state_size": 4}
    return transformers.MambaForCausalLM(transformers.MambaConfig(**sizes, **_TOKENS, use_cache=False))


def vit():
    sizes = {name: size for name, size in _SIZES.items() if name not in ("vocab_size", "max_position_embeddings")}
    config = transformers.ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=CLASSES)
    return transformers.ViTForImageClassification(config)


def t5_by_name():
    """As ``transformers`` has it: keyword arguments in, an output with ``loss`` out."""
    sizes = {"d_model": WIDTH, "d_kv": WIDTH // HEADS, "d_ff": INNER, "num_layers": LAYERS, "num_heads": HEADS}
    config = transformers.T5Config(vocab_size=VOCAB, **sizes, decoder_start_token_id=1, pad_token_id=0, eos_token_id=1)
    config.use_cache = False
    return transformers.T5ForConditionalGeneration(config)


def t5():
    return Translator(t5_by_name())


def whisper_by_name():
    """As ``transformers`` has it: keyword arguments in, an output with ``loss`` out."""
    sizes = {"d_model": WIDTH, "encoder_layers": LAYERS, "decoder_layers": LAYERS, "num_mel_bins": 8}
    sizes |= {"encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS}
    sizes |= {"encoder_ffn_dim": INNER, "decoder_ffn_dim": INNER, "max_source_positions": SEQUENCE}
    sizes |= {"max_target_positions": 2 * SEQUENCE, "vocab_size": VOCAB, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(**sizes, **_TOKENS, suppress_tokens=None, begin_suppress_tokens=None)
    config.use_cache = False
    return transformers.WhisperForConditionalGeneration(config)


def whisper():
    return Translator(whisper_by_name(), "input_features")


def bart():
    sizes = {"d_model": WIDTH, "encoder_layers": LAYERS, "decoder_layers": LAYERS, "vocab_size": VOCAB}
    sizes |= {"encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "decoder_start_token_id": 1}
    sizes |= {"encoder_ffn_dim": INNER, "decoder_ffn_dim": INNER, "max_position_embeddings": 2 * SEQUENCE}
    return Translator(transformers.BartForConditionalGeneration(transformers.BartConfig(**sizes, **_TOKENS)))


def falcon():
    return transformers.FalconForCausalLM(transformers.FalconConfig(**_CAUSAL, ffn_hidden_size=INNER))


def bloom():
    sizes = {"vocab_size": VOCAB, "hidden_size": WIDTH, "n_layer": LAYERS, "n_head": HEADS}
    return transformers.BloomForCausalLM(transformers.BloomConfig(**sizes, **_TOKENS, use_cache=False))


def albert():
    return transformers.AlbertForMaskedLM(transformers.AlbertConfig(**_BERT, embedding_size=16))


def distilbert():
    sizes = {"dim": WIDTH, "hidden_dim": INNER, "n_layers": LAYERS, "n_heads": HEADS, "vocab_size": VOCAB}
    config = transformers.DistilBertConfig(**sizes, max_position_embeddings=2 * SEQUENCE, attention_dropout=0.0)
    return transformers.DistilBertForMaskedLM(config)


def electra():
    return transformers.ElectraForMaskedLM(transformers.ElectraConfig(**_BERT, embedding_size=16))


def clip():
    text = {**_SIZES, **_TOKENS, "projection_dim": 16}
    vision = {name: size for name, size in _SIZES.items() if name not in ("vocab_size", "max_position_embeddings")}
    config = transformers.CLIPConfig(
        text_config=text,
        vision_config={**vision, "image_size": 16, "patch_size": 4, "projection_dim": 16},
        projection_dim=16,
    )
    return Matcher(transformers.CLIPModel(config))


class Matcher(nn.Module):
    """Whether an image and a text belong together, by the product of what CLIP makes of each."""

    def __init__(self, model):
        super().__init__()
        self.model, self.out = model, nn.Linear(1, 2)

    def forward(self, image, text):
        found = self.model(input_ids=text, pixel_values=image)
        return self.out((found.image_embeds * found.text_embeds).sum(-1, keepdim=True))


def convnext():
    config = transformers.ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, patch_size=2)
    config.num_labels = CLASSES
    return transformers.ConvNextForImageClassification(config)


def swin():
    sizes = {
        "image_size": 16,
        "patch_size": 2,
        "embed_dim": 16,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": 2,
    }
    return transformers.SwinForImageClassification(
        transformers.SwinConfig(**sizes, num_labels=CLASSES, drop_path_rate=0.0)
    )


def phi3():
    return transformers.Phi3ForCausalLM(transformers.Phi3Config(**_GROUPED))


def qwen2_moe():
    config = transformers.Qwen2MoeConfig(
        **_GROUPED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16
    )
    return transformers.Qwen2MoeForCausalLM(config)


def gemma2():
    return transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**_GROUPED, head_dim=WIDTH // HEADS, sliding_window=8)
    )


def olmo():
    return transformers.OlmoForCausalLM(transformers.OlmoConfig(**_GROUPED))


def gptj():
    sizes = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 2 * SEQUENCE, "vocab_size": VOCAB}
    config = transformers.GPTJConfig(**sizes, **_TOKENS, rotary_dim=4, attn_pdrop=0.0, use_cache=False)
    return transformers.GPTJForCausalLM(config)
