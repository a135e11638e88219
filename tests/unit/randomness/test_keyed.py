"""The bits that a rank draws for a part of a tensor are the part of the bits for the whole."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shoal.core.errors import RunError
from shoal.randomness import keyed as draws
from shoal.randomness.dropout import apply_keyed_dropout
from shoal.randomness.keyed import Layout, Window, draw_mask, read_shape

torch.set_num_threads(1)
SITE = torch.tensor([12345])


def _mask(shape: tuple[int, ...], ids: list[int], layout: Layout | None = None, p: float = 0.5, **more: bool) -> Tensor:
    layout = layout or Layout()
    return draw_mask(
        torch.empty(shape),
        torch.tensor([7, *ids]),
        SITE,
        1,
        p,
        1.0,
        more.get("channels", False),
        layout.batch_dim,
        layout.numbers,
    )


def _part(whole: Tensor, windows: tuple[Window, ...]) -> Tensor:
    for window in windows:
        chunks = whole.chunk(window.of, window.dim)
        whole = torch.cat([chunks[number] for number in window.chunks], window.dim)
    return whole


@pytest.mark.parametrize("p", [0.5, 0.1, 1e-5])  # sixteen bits and thirty-two
@pytest.mark.parametrize(
    ("shape", "windows"),
    [
        ((3, 8, 5), (Window(1, (1,), 4),)),  # sequence
        ((3, 8, 5), (Window(1, (0, 3), 4),)),  # zigzag
        ((3, 8, 6), (Window(-1, (1,), 2),)),  # features
        ((3, 8, 6), (Window(1, (1, 2), 4), Window(2, (0,), 3))),  # both
        ((2, 4, 6, 6), (Window(1, (1,), 2),)),  # heads
        ((2, 4, 6, 6), (Window(1, (3,), 4), Window(2, (2,), 3), Window(3, (1, 0), 2))),
        ((3, 8), (Window(1, (1, 0), 2),)),  # only moved
        ((2, 128, 512), (Window(1, (1,), 2), Window(2, (1,), 2))),  # large enough to jump, and odd enough to select
        ((2, 96, 170), (Window(1, (1, 4), 6),)),  # a stretch that begins within a block
    ],
)
def test_a_part_of_the_tensor_gets_its_part_of_the_mask(shape, windows, p):
    ids = list(range(40, 40 + shape[0]))
    expected = _part(_mask(shape, ids, p=p), windows)
    assert torch.equal(_mask(tuple(expected.shape), ids, Layout(windows=windows), p=p), expected)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_windows_compose(data):
    shape = [2, *(data.draw(st.sampled_from([1, 2, 4, 6, 12, 96])) for _ in range(data.draw(st.integers(1, 3))))]
    windows = []
    for dim in range(1, len(shape)):
        of = data.draw(st.sampled_from([n for n in (1, 2, 3, 4, 6) if shape[dim] % n == 0]))
        chunks = data.draw(st.lists(st.integers(0, of - 1), min_size=1, max_size=of, unique=True))
        windows.append(Window(dim if data.draw(st.booleans()) else dim - len(shape), tuple(chunks), of))
    data.draw(st.randoms()).shuffle(windows)
    expected = _part(_mask(tuple(shape), [5, 9]), tuple(windows))
    assert torch.equal(_mask(tuple(expected.shape), [5, 9], Layout(windows=tuple(windows))), expected)


def test_jumping_and_selecting_give_the_same_bits(monkeypatch):
    windows = (Window(1, (1, 2), 4), Window(2, (1,), 2))
    whole = _mask((2, 64, 512), [5, 9])
    for cost in (0, 1, 2000, 10**9):
        monkeypatch.setattr(draws, "_JUMP_ELEMENTS", max(cost, 1))
        draws._place.cache_clear()
        assert torch.equal(_mask((2, 32, 256), [5, 9], Layout(windows=windows)), _part(whole, windows))
    draws._place.cache_clear()


def test_a_sequence_part_draws_no_more_than_it_needs():
    reading = read_shape((2, 256, 256), 2, None)
    place = draws._place(reading, tuple(Layout(windows=(Window(1, (0, 3), 4),)).numbers), None)
    assert sum(size for _, size in place.ranges) == 256 * 256
    heads = draws._place(
        read_shape((2, 4, 64, 64), 2, None), tuple(Layout(windows=(Window(1, (1,), 2),)).numbers), None
    )
    assert heads.ranges == ((4 * 64 * 64, 4 * 64 * 64),)


def test_channels_follow_the_windows_of_their_dims():
    whole = _mask((3, 8, 5), [1, 2, 3], channels=True)
    windows = (Window(1, (2,), 4), Window(2, (0,), 2))  # the second is along what one draw serves
    assert torch.equal(_mask((3, 2, 5), [1, 2, 3], Layout(windows=windows), channels=True), whole[:, 4:6])


def test_rows_that_are_parts_of_samples_count_as_a_dim():
    """Attention weights as (batch x heads, queries, keys): the heads of a sample are its rows."""
    whole = _mask((2, 4, 6, 6), [5, 9])
    window = Window(1, (1,), 2)
    assert torch.equal(_mask((8, 6, 6), [5, 9]).view(2, 4, 6, 6), whole)
    part = _mask((4, 6, 6), [5, 9], Layout(windows=(window,)))
    assert torch.equal(part.view(2, 2, 6, 6), whole[:, 2:])


@pytest.mark.parametrize("length", [5, 4, 2, 3])  # among them a multiple of the batch, and the batch itself
def test_a_batch_in_dim_1_is_drawn_by_sample(length):
    first = _mask((2, length, 6), [5, 9])
    second = _mask((length, 2, 6), [5, 9], Layout(batch_dim=1))
    assert torch.equal(second, first.transpose(0, 1))
    window = (Window(0, (0,), length),)
    assert torch.equal(_mask((1, 2, 6), [5, 9], Layout(batch_dim=1, windows=window)), second[:1])


def test_shapes_are_read_in_one_way_or_called_a_guess():
    assert read_shape((4, 7, 3), 4, None) == draws._Reading((4, 7, 3), 0, False)
    assert read_shape((7, 4, 3), 4, None) == draws._Reading((7, 4, 3), 1, False)
    assert read_shape((8, 4, 3), 4, None) == draws._Reading((8, 4, 3), 1, True)  # or two rows each
    assert read_shape((8, 4, 3), 4, 1) == draws._Reading((8, 4, 3), 1, False)
    assert read_shape((8, 3), 4, None) == draws._Reading((4, 2, 3), 0, True)
    assert read_shape((7, 3), 4, None) == draws._Reading((7, 3), None, True)
    assert read_shape((), 4, None).batch_dim is None


def test_a_dim_that_does_not_divide_is_refused_with_the_numbers():
    with pytest.raises(RunError, match="is 7 long and should be 2 equal chunks of 4"):
        _mask((2, 7, 3), [1, 2], Layout(windows=(Window(1, (0, 3), 4),)))
    with pytest.raises(RunError, match="not there"):
        _mask((2, 8), [1, 2], Layout(windows=(Window(2, (0,), 4),)))
    with pytest.raises(RunError, match="its batch"):
        _mask((2, 8), [1, 2], Layout(windows=(Window(0, (0,), 4),)))


def _run(model: nn.Module, key, x: Tensor, ids: list[int]) -> Tensor:
    key.begin(3, ids)
    output: Tensor = model(x)
    return output


@pytest.mark.parametrize("kind", [nn.Dropout, nn.Dropout1d, nn.AlphaDropout, nn.FeatureAlphaDropout])
def test_every_kind_of_dropout_module_can_be_narrowed(kind):
    torch.manual_seed(0)
    x = torch.randn(4, 16, 6)
    whole_model, part_model = nn.Sequential(kind(0.5)), nn.Sequential(kind(0.5))
    whole = _run(whole_model, apply_keyed_dropout(whole_model, 0), x, [1, 2, 3, 4])
    key = apply_keyed_dropout(part_model, 0)
    windows = (Window(1, (1, 2), 4),)
    key.narrow("0", windows)
    assert torch.equal(_run(part_model, key, _part(x, windows), [1, 2, 3, 4]), _part(whole, windows))
    assert not torch.equal(whole, x)
    with pytest.raises(RunError, match="no module 'nowhere'"):
        key.narrow("nowhere", windows)


def test_a_narrowed_mask_can_be_compiled():
    model = nn.Sequential(nn.Dropout(0.5))
    key = apply_keyed_dropout(model, 0)
    x = torch.randn(2, 8, 4)
    whole = _run(model, key, x, [1, 2])
    key.narrow("0", (Window(1, (1,), 2),))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(_run(compiled, key, x[:, 4:], [1, 2]), whole[:, 4:])
    arguments = (torch.randn(2, 4), torch.tensor([1, 5, 6]), torch.tensor([3]), 0, 0.5, 2.0, False, 0, [1, 2, 1, 0])
    torch.library.opcheck(torch.ops.shoal.draw_dropout_mask.default, arguments)


def test_torchs_own_layers_with_the_sequence_first_draw_by_sample():
    """The batch is dim 1 there whatever its size: a microbatch as long as the sequence must not be read the other way."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=False)
    key = apply_keyed_dropout(layer, 0)
    layer.self_attn.dropout = 0.0
    x = torch.randn(4, 4, 8)  # (sequence, batch, features)
    whole = _run(layer, key, x, [5, 6, 7, 8])
    halves = [_run(layer, key, x[:, a : a + 2].contiguous(), [5 + a, 6 + a]) for a in (0, 2)]
    torch.testing.assert_close(torch.cat(halves, 1), whole)
    assert not key.odd_shapes()


def test_parts_of_all_ranks_make_the_whole():
    whole = _mask((2, 16, 8), [5, 9])
    for index, rank in itertools.product(range(2), range(2)):
        chunks = (index, 3 - index)
        windows = (Window(1, chunks, 4), Window(-1, (rank,), 2))
        assert torch.equal(_mask((2, 8, 4), [5, 9], Layout(windows=windows)), _part(whole, windows))
