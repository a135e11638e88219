"""Which models are tried under which plans: the rows and the columns of the table in ``docs/guides/models.md``."""

from dataclasses import dataclass

PLANS = ("dp=2", "dp=2 zero=3", "tp=2", "pp=2", "cp=2")


@dataclass(frozen=True)
class Family:
    """One model: what it is called, and the functions that build it and its data."""

    name: str
    build: str
    data: str
    loss: str | None = None
    """The function that scores it, where that is none of Shoal's."""

    @property
    def recipe(self) -> str:
        """Its recipe; the folder of the tests is where its functions are imported from."""
        loss = "" if self.loss is None else f'loss = "families.{self.loss}"'
        return _RECIPE.format(build=self.build, data=self.data, loss=loss)


_RECIPE = """
plan = "dp=1"
[model]
build = "families.{build}"
{loss}
[data]
build = "families.data:{data}"
[train]
steps = 4
global_batch = 4
threads = 1
seed = 1
[optim]
name = "adamw"
lr = 1e-3
[telemetry]
tensorboard = false
"""

_HUGGING_FACE = (
    ("T5", "t5", "translations"),
    ("OPT", "opt", "next_tokens"),
    ("GPT-NeoX", "gpt_neox", "next_tokens"),
    ("Qwen2", "qwen2", "next_tokens"),
    ("Qwen3", "qwen3", "next_tokens"),
    ("Gemma", "gemma", "next_tokens"),
    ("Mistral", "mistral", "next_tokens"),
    ("Llama", "llama", "next_tokens"),
    ("Phi", "phi", "next_tokens"),
    ("ViT", "vit", "images"),
    ("DeBERTa", "deberta", "masked_tokens"),
    ("Whisper", "whisper", "speech"),
    ("Mamba", "mamba", "next_tokens"),
    ("Mixtral", "mixtral", "next_tokens"),
    ("RoBERTa", "roberta", "masked_tokens"),
    ("BERT", "bert", "masked_tokens"),
    ("GPT-2", "gpt2", "next_tokens"),
)
_PLAIN = (
    ("ResNet", "resnet", "images"),
    ("DLRM", "dlrm", "clicks"),
    ("LSTM", "lstm", "next_tokens"),
    ("ViT of one's own", "vit", "images"),
    ("U-Net", "unet", "segments"),
    ("TransformerEncoder", "transformer_encoder", "labelled_tokens"),
    ("two-tower", "two_tower", "couples"),
    ("LoRA by hand", "lora", "labelled_tokens"),
    ("autoencoder", "autoencoder", "vectors"),
    ("graph network", "graph_network", "graphs"),
)
HUGGING_FACE = tuple(Family(name, f"hugging_face:{build}", data) for name, build, data in _HUGGING_FACE)
PLAIN = tuple(Family(name, f"plain:{build}", data) for name, build, data in _PLAIN)
_MORE = (
    ("BART", "hugging_face:bart", "translations"),
    ("Falcon", "hugging_face:falcon", "next_tokens"),
    ("BLOOM", "hugging_face:bloom", "next_tokens"),
    ("ALBERT", "hugging_face:albert", "masked_tokens"),
    ("DistilBERT", "hugging_face:distilbert", "masked_tokens"),
    ("ELECTRA", "hugging_face:electra", "masked_tokens"),
    ("CLIP", "hugging_face:clip", "captions"),
    ("ConvNeXt", "hugging_face:convnext", "images"),
    ("Swin", "hugging_face:swin", "images"),
    ("Phi-3", "hugging_face:phi3", "next_tokens"),
    ("Qwen2-MoE", "hugging_face:qwen2_moe", "next_tokens"),
    ("Gemma 2", "hugging_face:gemma2", "next_tokens"),
    ("OLMo", "hugging_face:olmo", "next_tokens"),
    ("GPT-J", "hugging_face:gptj", "next_tokens"),
    ("GRU", "plain:gru", "labelled_tokens"),
    ("MLP-Mixer", "plain:mlp_mixer", "images"),
)
MORE = tuple(Family(*row) for row in _MORE)
BY_FORM = (
    Family("CLIP-like, over the global batch", "contrastive:clip", "captions", "contrastive:over_global_batch"),
    Family("DLRM, dict batch", "plain:dlrm", "named_clicks"),
    Family("MLP", "plain:mlp", "images"),
    Family("T5, dict batch", "hugging_face:t5_by_name", "named_translations"),
    Family("Whisper, dict batch", "hugging_face:whisper_by_name", "named_speech"),
    Family("LoRA of `peft` on Llama", "hugging_face:llama_with_lora", "next_tokens"),
)
"""Losses over the global batch, batches that are dicts, with the loss in the model's output for T5 and Whisper, and adapters."""
GAN = "GAN, two models in one loop"
"""A row that no recipe makes: ``gan.py`` proves it."""
EVERY = (*HUGGING_FACE, *PLAIN, *MORE, *BY_FORM)
ASKED = (
    ("MLP", "MLP"),
    ("GAN", GAN),
    ("CLIP-like, contrastive over the global batch", "CLIP-like, over the global batch"),
    ("U-Net", "U-Net"),
    ("DLRM with several embedding tables and a dict batch", "DLRM, dict batch"),
    ("LSTM language model", "LSTM"),
    ("ViT", "ViT of one's own"),
    ("ResNet with batch norm", "ResNet"),
    ("T5 of `transformers`, inputs by position", "T5"),
    ("T5 of `transformers`, a dict batch and its own loss", "T5, dict batch"),
    ("Whisper of `transformers`, inputs by position", "Whisper"),
    ("Whisper of `transformers`, a dict batch and its own loss", "Whisper, dict batch"),
    ("LoRA of `peft` on a Llama of `transformers`", "LoRA of `peft` on Llama"),
)
"""The families of docs/families.md by their names in the catalogue."""
