"""Which rank writes which tensor."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.checkpoint.commit import write_checkpoint
from shoal.checkpoint.files import NotWhole
from shoal.checkpoint.holdings import assign, cuts_of, decode_listing, divide, encode_listing
from shoal.checkpoint.pieces import blobs_of, list_holdings, view_cuts
from shoal.checkpoint.reader import read, read_local
from shoal.checkpoint.whole import verify
from shoal.comm.full_tensor import take_local
from shoal.core.errors import RequestError, RunError
from shoal.core.placement import Patch, Placement, place_whole

SIZES = st.dictionaries(st.text(min_size=1, max_size=5), st.integers(0, 10**9), max_size=60)


@given(SIZES, st.integers(1, 9))
def test_every_tensor_has_one_rank_and_the_load_is_balanced(sizes, num_ranks):
    owners = assign(sizes, num_ranks)
    assert owners.keys() == sizes.keys() and set(owners.values()) <= set(range(num_ranks))
    loads = [sum(size for name, size in sizes.items() if owners[name] == rank) for rank in range(num_ranks)]
    # No rank is ahead of another by more than its last, smallest tensor.
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)
    fair = max(sum(sizes.values()) / num_ranks, max(sizes.values(), default=0))
    assert max(loads) <= 2 * fair


@given(SIZES, st.integers(1, 9), st.randoms())
def test_the_order_of_the_mapping_does_not_matter(sizes, num_ranks, random):
    names = list(sizes)
    random.shuffle(names)
    assert assign({name: sizes[name] for name in names}, num_ranks) == assign(sizes, num_ranks)


def test_an_example():
    assert assign({"a": 5, "b": 4, "c": 3, "d": 3}, 2) == {"a": 0, "b": 1, "c": 1, "d": 0}


torch.set_num_threads(1)

SHAPES = {
    "weights/matrix": (12, 8),
    "weights/fused": (24, 4),
    "weights/fused_columns": (4, 24),
    "weights/words": (13, 4),
    "weights/norm": (8,),
    "weights/empty": (0, 4),
    "optimizer/matrix/step": (),
}


def whole_state(seed):
    generator = torch.Generator().manual_seed(seed)
    state = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    state["weights/norm"] = state["weights/norm"].to(torch.bfloat16)
    return state


def place(shape, local_shape, *patches):
    made = tuple(Patch(local_start=local, whole_start=whole, shape=extent) for local, whole, extent in patches)
    return Placement(whole_shape=shape, local_shape=local_shape, patches=made)


def spread(length, parts, rank):
    """Rank's part of a range, the first ones longer by one where it does not divide."""
    start = rank * length // parts
    return start, (rank + 1) * length // parts - start


def split(shape, dim, parts, rank):
    start, extent = spread(shape[dim], parts, rank)
    local = (*shape[:dim], extent, *shape[dim + 1 :])
    origin = (0,) * len(shape)
    return place(shape, local, (origin, (*origin[:dim], start, *origin[dim + 1 :]), local))


def split_fused(shape, dim, parts, rank, stretches=3):
    """Three matrices in one, each of them split."""
    length = shape[dim] // stretches
    start, extent = spread(length, parts, rank)
    part = (*shape[:dim], extent, *shape[dim + 1 :])

    def at(index):
        return tuple(index if d == dim else 0 for d in range(len(shape)))

    patches = [(at(number * extent), at(number * length + start), part) for number in range(stretches)]
    return place(shape, (*shape[:dim], stretches * extent, *shape[dim + 1 :]), *patches)


def split_padded(shape, parts, rank):
    """A vocabulary padded to a multiple: the last rank's rows are padding in part, or all of them."""
    height = -(-shape[0] // parts) + 1
    start = min(rank * height, shape[0])
    extent = min(height, shape[0] - start)
    patches = [((0, 0), (start, 0), (extent, *shape[1:]))] if extent else []
    return place(shape, (height, *shape[1:]), *patches)


def tensor_parallel(parts, rank, dim):
    shapes = SHAPES
    return {
        "weights/matrix": split(shapes["weights/matrix"], dim, parts, rank),
        "weights/fused": split_fused(shapes["weights/fused"], 0, parts, rank),
        "weights/fused_columns": split_fused(shapes["weights/fused_columns"], 1, parts, rank),
        "weights/words": split_padded(shapes["weights/words"], parts, rank),
        "weights/norm": place_whole(shapes["weights/norm"]),
        "weights/empty": place_whole(shapes["weights/empty"]),
        "optimizer/matrix/step": place_whole(()),
    }


def layout(tp, dp, dim, *, zero):
    """The placements of every rank: tensor parallel, and under ZeRO some rows of that."""
    ranks = []
    for replica in range(dp):
        for rank in range(tp):
            placements = tensor_parallel(tp, rank, dim)
            if zero:
                placements = {name: cut_rows(placement, dp, replica) for name, placement in placements.items()}
                placements = {name: placement for name, placement in placements.items() if placement is not None}
            ranks.append(placements)
    return ranks


def cut_rows(placement, parts, rank):
    if not placement.local_shape:
        return placement if rank == parts - 1 else None
    start, extent = spread(placement.local_shape[0], parts, rank)
    return placement.rows(start, start + extent)


def spoil(local, placement):
    """Padding holds anything: it must be neither saved nor loaded."""
    ones = take_local(torch.ones(placement.whole_shape), placement).bool()
    return torch.where(ones, local, torch.full_like(local, 7))


def save(root, state, ranks, *, chunk_bytes=512):
    listings, locals_ = [], []
    for placements in ranks:
        tensors = {name: spoil(take_local(state[name], at), at) for name, at in placements.items()}
        locals_.append(tensors)
        listings.append(decode_listing(encode_listing(list_holdings(tensors, placements))))
    shares = divide(listings)
    blobs = []
    for tensors, placements, listing, share in zip(locals_, ranks, listings, shares, strict=True):
        views = view_cuts(tensors, placements, cuts_of(listing))
        blobs.append(blobs_of(share, {cut: view.contiguous() for cut, view in views.items()}))
    return write_checkpoint(root, step=1, ranks=blobs, cuts=shares, values={}, chunk_bytes=chunk_bytes), shares


def same(first, second):
    assert first.dtype == second.dtype and first.shape == second.shape
    return torch.equal(first.reshape(-1).view(torch.uint8), second.reshape(-1).view(torch.uint8))


LAYOUTS = st.builds(layout, st.integers(1, 4), st.integers(1, 3), st.sampled_from([0, 1]), zero=st.booleans())


@settings(max_examples=40, deadline=None)
@given(LAYOUTS, LAYOUTS, st.integers(0, 10**6))
def test_any_layout_becomes_any_other(tmp_path_factory, saved, loaded, seed):
    state = whole_state(seed)
    path, _ = save(tmp_path_factory.mktemp("c"), state, saved)
    assert verify(path) == []
    wholes = read(path).tensors
    assert list(wholes) == sorted(state) and all(same(wholes[name], whole) for name, whole in state.items())
    for placements in loaded:
        found = read_local(path, placements)
        assert list(found) == list(placements)
        for name, placement in placements.items():
            assert same(found[name], take_local(state[name], placement)), name


@st.composite
def scattered(draw):
    """Boxes that overlap as they please on several ranks; the last rank holds all, so that nothing is missing."""
    ranks = []
    for _ in range(draw(st.integers(1, 3))):
        low = draw(st.tuples(st.integers(0, 5), st.integers(0, 5)))
        high = draw(st.tuples(st.integers(low[0] + 1, 6), st.integers(low[1] + 1, 6)))
        extent = (high[0] - low[0], high[1] - low[1])
        ranks.append({"a": place((6, 6), extent, ((0, 0), low, extent))})
    return [*ranks, {"a": place_whole((6, 6))}]


@settings(max_examples=60, deadline=None)
@given(scattered())
def test_boxes_that_overlap_in_part_are_written_once(tmp_path_factory, ranks):
    state = {"a": torch.randn(6, 6)}
    path, shares = save(tmp_path_factory.mktemp("c"), state, ranks)
    assert sum(cut.box.num_elements for share in shares for cut in share) == 36
    assert same(read(path).tensors["a"], state["a"])


def test_replicas_share_the_writing_and_everything_is_written_once(tmp_path):
    state = {f"weights/{index}": torch.randn(40, 10) for index in range(8)}
    placements = {name: place_whole((40, 10)) for name in state}
    only_first = {"weights/0": split((40, 10), 0, 2, 0)}, {"weights/0": split((40, 10), 0, 2, 1)}
    _, shares = save(tmp_path, state, [placements | only_first[rank] for rank in (0, 1, 0, 1)])
    written = [sum(cut.box.num_elements for cut in share) for share in shares]
    assert sum(written) == 8 * 400 and max(written) - min(written) <= 400


def test_the_order_of_a_ranks_names_does_not_matter():
    listings = [list_holdings(whole_state(1), {}) for _ in range(3)]
    shuffled = [
        dict(random.Random(rank).sample(list(listing.items()), len(listing))) for rank, listing in enumerate(listings)
    ]
    assert divide(listings) == divide(shuffled)


def test_what_no_rank_holds_is_named_with_both_numbers():
    halves = [list_holdings({"a": torch.ones(3, 4)}, {"a": split((6, 4), 0, 2, rank)}) for rank in (0, 0)]
    with pytest.raises(NotWhole, match=r"the pieces of 'a' leave gaps: they have 12 elements, \[6, 4\] has 24"):
        divide(halves)
    other = list_holdings({"a": torch.ones(3, 4).double()}, {"a": split((6, 4), 0, 2, 1)})
    with pytest.raises(NotWhole, match=r"'a' is F32 \[6, 4\] on rank 0 and F64 \[6, 4\] on rank 1"):
        divide([halves[0], other])


def test_a_placement_that_does_not_fit_its_tensor_and_keys_that_collide_are_refused():
    with pytest.raises(ValueError, match=r"'a' is \(2, 4\), and its placement says \(3, 4\)"):
        list_holdings({"a": torch.ones(2, 4)}, {"a": split((6, 4), 0, 2, 0)})
    tensors = {"a": torch.ones(3, 4), "a[0:3, 0:4]": torch.ones(1)}
    placements = {"a": split((6, 4), 0, 2, 0)}
    with pytest.raises(ValueError, match="would both be called"):
        view_cuts(tensors, placements, cuts_of(list_holdings(tensors, placements)))


@pytest.mark.parametrize("text", [b"[]", b'{"a": 1}', b'{"a": {"dtype": "X", "shape": [], "boxes": []}}', b"\xff"])
def test_a_listing_is_not_believed(text):
    with pytest.raises(NotWhole, match="listing"):
        decode_listing(text)


def test_what_does_not_fit_is_named_with_both_shapes(tmp_path):
    path, _ = save(tmp_path, whole_state(1), layout(2, 1, 0, zero=False))
    with pytest.raises(RunError, match="lacks 'x', 'y'"):
        read_local(path, {"weights/norm": place_whole((8,)), "x": place_whole(()), "y": place_whole(())})
    with pytest.raises(RunError, match=r"'weights/matrix': saved as \[12, 8\], wanted as \[12, 9\]"):
        read_local(path, {"weights/matrix": place_whole((12, 9))})
    with pytest.raises(RequestError, match="no such checkpoint"):
        read_local(tmp_path / "nowhere", {})


@pytest.mark.parametrize("saved", [1, 2])
def test_fused_columns_of_many_chunks(tmp_path, saved):
    """The three stretches of a row lie among each other in the file, and every chunk ends in the middle of one."""
    state = {"a": torch.randn(40, 96)}
    path, _ = save(tmp_path, state, [{"a": split((40, 96), 0, saved, rank)} for rank in range(saved)], chunk_bytes=520)
    for rank in range(4):
        placement = split_fused((40, 96), 1, 4, rank)
        assert same(read_local(path, {"a": placement})["a"], take_local(state["a"], placement))


def test_a_box_that_overlaps_another_in_part_is_cut(tmp_path):
    state = {"a": torch.randn(6, 6)}
    ranks = [{"a": place((6, 6), (4, 6), ((0, 0), (start, 0), (4, 6)))} for start in (0, 2)]
    path, _ = save(tmp_path, state, ranks)
    assert same(read(path).tensors["a"], state["a"])


def test_only_chunks_that_are_needed_are_read_and_those_are_checked(tmp_path):
    state = {"a": torch.randn(1024, 16)}
    path, _ = save(tmp_path, state, [{"a": place_whole((1024, 16))}], chunk_bytes=4096)
    shard = path / "rank-000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    top, bottom = (split((1024, 16), 0, 2, rank) for rank in (0, 1))
    assert same(read_local(path, {"a": top})["a"], state["a"][:512])
    with pytest.raises(NotWhole, match=r"step-00000001 is not whole: rank-000.safetensors: bytes"):
        read_local(path, {"a": bottom})
