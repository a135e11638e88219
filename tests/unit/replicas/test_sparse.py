"""What an island of ``sparse`` sends of a change."""

import pytest
import torch

from shoal.replicas.sparse import CHUNK, decode_largest, encode_largest, largest_places, payload_bytes


def test_of_equal_magnitudes_the_first_is_sent():
    """The fast way for float32 takes what a stable sort of magnitudes takes."""
    rows = torch.randn(5, CHUNK, generator=torch.Generator().manual_seed(0))
    rows[0], rows[1, 7::3], rows[2, ::2] = 0.0, -2.0, rows[2, 1::2]
    rows[3] = torch.tensor([1.0, -1.0]).repeat(CHUNK // 2)
    rows[4] *= 1e-42
    for kept in (1, 40, CHUNK):
        wanted = rows.abs().sort(dim=1, descending=True, stable=True).indices[:, :kept]
        assert torch.equal(largest_places(rows, kept), wanted)
        assert torch.equal(largest_places(rows.double(), kept), wanted)


@pytest.mark.parametrize("bits", [2, 32])
def test_what_is_sent_has_the_bytes_that_are_forecast_and_comes_back(bits):
    flat = torch.randn(CHUNK + 100, generator=torch.Generator().manual_seed(1))
    payload = torch.cat(list(encode_largest(flat, 0.1, bits=bits)))
    assert payload.numel() == payload_bytes([flat.numel()], 0.1, bits=bits, item_bytes=4)
    found, end = decode_largest(payload, 0, flat, 0.1, bits=bits)
    assert end == payload.numel() and int(found.count_nonzero()) == 409 + 10
    assert bits == 2 or torch.equal(found[found != 0], flat[found != 0])
