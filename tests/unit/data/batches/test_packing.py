"""Padding counts for nothing, and packed documents train as each by itself."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal.core.errors import RequestError, RunError
from shoal.data.batches.packing import PackedSource, cumulative_lengths, pack
from shoal.data.batches.padding import PadCollate
from shoal.data.loading.steploader import StepLoader
from shoal.data.options import LoaderOptions
from shoal.data.spec import IGNORED
from shoal.models.config import GptConfig
from shoal.models.gpt import Gpt
from shoal.models.losses import cross_entropy

torch.set_num_threads(1)
VOCAB, LENGTH = 29, 16
LENGTHS = [5, 9, 2, 17, 16, 3, 1, 40, 7, 7]


def _documents() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCAB, (length,), generator=generator) for length in LENGTHS]


def _model() -> Gpt:
    torch.manual_seed(0)
    config = GptConfig(layers=2, hidden=16, heads=4, kv_heads=2, dropout=0.0)
    return Gpt(config, vocab=VOCAB, sequence=64).double()


def _gradient(model: Gpt, loss: Tensor) -> Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters() if parameter.grad is not None])


def _is_near(found: Tensor, expected: Tensor) -> bool:
    """The law of numerics in float64: the norm of the difference over the norm of the reference."""
    return float((found - expected).norm() / expected.norm()) <= 1e-12


def test_every_token_is_packed_once_and_nothing_is_too_long() -> None:
    packed = pack(LENGTHS, LENGTH, seed=4)
    read = sorted(
        (piece.document, place) for row in packed for piece in row for place in range(piece.start, piece.stop)
    )
    assert read == [(document, place) for document, length in enumerate(LENGTHS) for place in range(length - 1)]
    assert all(sum(piece.stop - piece.start for piece in row) <= LENGTH for row in packed)
    assert pack(LENGTHS, LENGTH, seed=4) == packed != pack(LENGTHS, LENGTH, seed=5)
    assert len(packed) == -(-sum(length - 1 for length in LENGTHS) // LENGTH), (
        "best fit leaves no sequence too many here"
    )


def test_packed_documents_equal_each_document_by_itself() -> None:
    source, model = PackedSource(_documents(), LENGTH, seed=2), _model()
    items = source.collate(range(len(source)))
    packed = cross_entropy(model(*items.inputs), items.targets)
    total: Any = 0.0
    for row in source.sequences:
        for piece in row:
            tokens = _documents()[piece.document][piece.start : piece.stop + 1][None]
            total = total + cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]) * (tokens.shape[1] - 1)
    alone = total / items.weight
    assert items.weight == sum(length - 1 for length in LENGTHS)
    assert _is_near(packed.detach(), alone.detach())
    assert _is_near(_gradient(model, packed), _gradient(model, alone))
    # The proof can fail: without the documents a position sees those before its own.
    assert not _is_near(model(items.inputs[0]).detach(), model(*items.inputs).detach())


def test_more_padding_changes_neither_the_weight_nor_what_is_learnt() -> None:
    samples = [(document[:-1], document[1:]) for document in _documents() if len(document) > 1]
    model, found = _model(), []
    for length in (None, 48, 64):
        options = LoaderOptions(collate_fn=PadCollate(length=length), shuffle=False)
        with StepLoader(samples, global_batch=len(samples), options=options) as loader:
            (microbatch,) = loader.next().microbatches
        assert microbatch.inputs[0].shape[1] == (length or 39)
        loss = cross_entropy(model(*microbatch.inputs), microbatch.targets)
        found.append((microbatch.weight, loss.detach(), _gradient(model, loss)))
    assert {weight for weight, _, _ in found} == {float(sum(length - 1 for length in LENGTHS))}
    assert all(_is_near(loss, found[0][1]) and _is_near(gradient, found[0][2]) for _, loss, gradient in found)


def test_dicts_are_padded_by_their_keys() -> None:
    samples = [
        {"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1], "labels": [1, 2, 3], "score": 0.5},
        {"input_ids": np.array([4]), "attention_mask": np.array([1]), "labels": np.array([4]), "score": 1.5},
    ]
    batch = PadCollate(padding_value=9, multiple_of=4)(samples)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 9], [4, 9, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert batch["labels"].tolist() == [[1, 2, 3, IGNORED], [4, IGNORED, IGNORED, IGNORED]]
    assert batch["score"].tolist() == [0.5, 1.5]
    with pytest.raises(RunError, match="padding would count in the loss"):
        PadCollate()([(torch.ones(2), torch.ones(2)), (torch.ones(3), torch.ones(3))])
    with pytest.raises(RunError, match="a sample has 3 positions and PadCollate pads to length 2"):
        PadCollate(length=2)([(torch.ones(3), torch.ones(3))])


def test_where_documents_begin() -> None:
    documents = torch.tensor([[0, 0, 1, -1], [0, 1, 1, 1]])
    assert cumulative_lengths(documents).tolist() == [0, 2, 3, 4, 5, 8]


def test_what_cannot_be_packed_is_said() -> None:
    with pytest.raises(RequestError, match="no document has two tokens or more"):
        PackedSource([torch.tensor([1])], 4)
    with pytest.raises(RequestError, match=r"document 0 is \(2,\) torch.float32; give a sequence of whole numbers"):
        PackedSource([torch.ones(2)], 4)
    with pytest.raises(RequestError, match="there are 1 lengths and 2 documents"):
        PackedSource([torch.tensor([1, 2])] * 2, 4, lengths=[2])


def test_lengths_that_are_not_those_of_the_documents_are_said() -> None:
    with pytest.raises(RunError, match="document 0 has 3 tokens, and lengths say 4; correct lengths"):
        PackedSource([torch.arange(3)], 8, lengths=[4]).collate([0])
