"""Models and data whose batches are no plain pairs: Hugging Face models with their labels, a DLRM, several tasks."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

IGNORED = -100
TABLES = {"user": 11, "item": 7, "day": 5}


class Rows(Dataset[Any]):
    """Samples in a list."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def _texts(count: int, vocab: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(7)
    lengths = torch.randint(3, 9, (count,), generator=draw).tolist()
    return [torch.randint(2, vocab, (length,), generator=draw).tolist() for length in lengths]


def causal_texts(count: int = 32, vocab: int = 48) -> Rows:
    """Token lists of several lengths, to be padded by ``pad``."""
    return Rows(_texts(count, vocab))


def pad(samples: list[list[int]]) -> dict[str, Tensor]:
    """A batch as tokenizers give it: padded, with a mask, and labels of -100 where nothing is to be predicted."""
    ids = torch.zeros((len(samples), 8), dtype=torch.int64)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, IGNORED)
    for row, sample in enumerate(samples):
        ids[row, : len(sample)] = torch.tensor(sample)
        mask[row, : len(sample)] = 1
        labels[row, : len(sample)] = torch.tensor(sample)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def build_llama(vocab: int = 48, layers: int = 2) -> nn.Module:
    """A tiny causal language model that computes its loss from ``labels``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab, hidden_size=16, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16, use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def seq2seq_texts(count: int = 32, vocab: int = 48) -> Rows:
    """Dicts of a source and its labels, for an encoder-decoder."""
    return Rows(
        [
            {
                "input_ids": batch["input_ids"][0],
                "attention_mask": batch["attention_mask"][0],
                "labels": batch["labels"][0],
            }
            for batch in (pad([text]) for text in _texts(count, vocab))
        ]
    )


def build_t5(vocab: int = 48) -> nn.Module:
    """A tiny encoder-decoder that makes its decoder's inputs of ``labels``."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=vocab, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0, use_cache=False,
        decoder_start_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def sounds(count: int = 24) -> Rows:
    """Dicts of features and labels, as for Whisper."""
    draw = torch.Generator().manual_seed(5)
    return Rows(
        [
            {"input_features": torch.randn(8, 16, generator=draw), "labels": torch.randint(2, 40, (6,), generator=draw)}
            for _ in range(count)
        ]
    )


def build_whisper() -> nn.Module:
    """A tiny Whisper."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=40, num_mel_bins=8, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_source_positions=8, max_target_positions=16,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, use_cache=False, dropout=0.0,
    )  # fmt: skip
    return WhisperForConditionalGeneration(config)


class Dlrm(nn.Module):
    """Several embedding tables and dense features; its batch is one dict."""

    def __init__(self, sizes: tuple[int, ...] = (11, 7, 5), width: int = 8) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(size, width) for size in sizes])
        self.bottom = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, width))
        self.top = nn.Sequential(nn.Linear(width * (len(sizes) + 1), 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: Tensor, sparse: dict[str, Tensor]) -> dict[str, Tensor]:
        parts = [self.bottom(dense), *(table(ids) for table, ids in zip(self.tables, sparse.values(), strict=True))]
        return {"click": self.top(torch.cat(parts, dim=-1)).squeeze(-1)}


def build_dlrm() -> nn.Module:
    """See ``Dlrm``."""
    return Dlrm()


def clicks(count: int = 32) -> Rows:
    """One dict per sample; the forward pass takes two of its keys, the loss reads the third."""
    draw = torch.Generator().manual_seed(3)
    return Rows([
        {
            "dense": torch.randn(4, generator=draw),
            "sparse": {name: int(torch.randint(0, size, (), generator=draw)) for name, size in TABLES.items()},
            "clicked": float(index % 3 == 0),
        }
        for index in range(count)
    ])  # fmt: skip


def click_loss(output: dict[str, Tensor], batch: dict[str, Any]) -> Tensor:
    """Of the whole batch: what it compares with is one of its keys."""
    return F.binary_cross_entropy_with_logits(output["click"], batch["clicked"].to(output["click"].dtype))


class TwoTasks(nn.Module):
    """One trunk, a class and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
        self.kind, self.size = nn.Linear(16, 3), nn.Linear(16, 1)

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(torch.cat([left, right], dim=-1))
        return self.kind(hidden), self.size(hidden).squeeze(-1)


def build_two_tasks() -> nn.Module:
    """See ``TwoTasks``."""
    return TwoTasks()


def two_tasks(count: int = 32) -> Rows:
    """``(dict of inputs, dict of targets)``."""
    draw = torch.Generator().manual_seed(4)
    return Rows([
        (
            {"left": torch.randn(3, generator=draw), "right": torch.randn(3, generator=draw)},
            {"kind": index % 3, "size": float(index % 5)},
        )
        for index in range(count)
    ])  # fmt: skip


def both_losses(output: tuple[Tensor, Tensor], targets: dict[str, Tensor]) -> Tensor:
    """The sum of two means over samples."""
    kind, size = output
    return F.cross_entropy(kind, targets["kind"]) + F.mse_loss(size, targets["size"].to(size.dtype))


def metrics_step(model: nn.Module, batch: Any) -> dict[str, Any]:
    """A step of the user's own, with two metrics."""
    inputs, targets = batch
    kind, size = model(**inputs)
    hits = (kind.argmax(dim=-1) == targets["kind"]).to(kind.dtype).mean()
    return {"loss": both_losses((kind, size), targets), "hits": hits, "size": size.detach().mean()}
