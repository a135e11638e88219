"""What workers have not sent yet, beside a shard: saved at the version that it is of, handed out once, its sum conserved."""

import pytest
import torch

from shoal.compression.config import CompressionConfig
from shoal.core.compressrule import CompressRule
from shoal.paramserver.config import ParamServerConfig
from shoal.paramserver.pushcodec import PushCodec, PushCompressor
from shoal.paramserver.records import Entry, PushId, Update
from shoal.paramserver.server.kept import KeptResiduals, share_out
from shoal.paramserver.sharding import TensorSpec, cut_for
from shoal.paramserver.sparse import WrongGradient

MODEL = {
    "bias": TensorSpec((40,), "float32"),
    "matrix": TensorSpec((50, 40), "float32"),
    "wide": TensorSpec((30, 60), "float32"),
}


def make(every=2, workers=2):
    shard_map = cut_for(MODEL, 2, config=ParamServerConfig(), optimizer="adamw")
    codec = PushCodec(
        CompressRule.parse("int4"),
        CompressionConfig(min_elements=100),
        model=MODEL,
        seed=3,
        num_shares=workers,
        saved_every=every,
        last_step=5,
    )
    sizes = [shard.numel for shard in shard_map.shards]
    return codec, shard_map, [slice(sum(sizes[:place]), sum(sizes[: place + 1])) for place in range(len(sizes))]


def gradient(seed):
    return torch.randn(sum(spec.numel for spec in MODEL.values()), generator=torch.Generator().manual_seed(seed))


def update(number, *pushes):
    entries = tuple(Entry(one.worker, one.number, 1.0) for one in pushes)
    return Update(
        number=number, entries=entries, loss=0.0, weight=1.0, samples=1, first_step=0, last_step=0, staleness=0
    )


def test_a_worker_that_takes_what_it_sent_for_a_checkpoint_sends_the_bytes_of_one_that_went_on():
    codec, shard_map, spans = make()
    worker, again = PushCompressor(codec, shard_map, 1), PushCompressor(codec, shard_map, 1)
    told = []
    for step in range(5):
        sent = worker.encode(gradient(step), spans, 2 * step + 1)
        worker.settle(is_kept=True)
        keepers = {packed.keeper for packed, _ in sent}
        assert keepers == ({1} if step + 1 in (2, 4, 5) else {None}), step
        if step == 3:
            told = [
                codec.split_kept(payload, packed, shard)
                for shard, (packed, payload) in zip(shard_map.shards, sent, strict=True)
            ]
    for shard, (_, kept) in enumerate(told):
        again.take(shard, kept)
    after = [payload for _, payload in again.encode(gradient(4), spans, 9)]
    assert all(map(torch.equal, after, [payload for _, payload in sent]))
    fresh = [payload for _, payload in PushCompressor(codec, shard_map, 1).encode(gradient(4), spans, 9)]
    assert not any(map(torch.equal, after, fresh)), "what was kept makes a difference"
    assert worker.num_kept_bytes == 3 * 4 * sum(map(codec.kept_numel, shard_map.shards))


def test_a_residual_that_nobody_asked_for_is_refused():
    codec, shard_map, spans = make()
    packed, payload = PushCompressor(codec, shard_map, 1).encode(gradient(1), spans, 3)[0]
    silent, _, _ = make(every=0)
    with pytest.raises(WrongGradient, match="none is due"):
        silent.split_kept(payload, packed, shard_map.shards[0])
    with pytest.raises(WrongGradient, match="none is due"):
        codec.split_kept(payload[:8], packed, shard_map.shards[0])


def test_what_came_with_an_update_is_of_that_version_alone():
    kept, first, second = KeptResiduals(3), PushId("a", 0), PushId("b", 0)
    kept.store(first, 0, torch.ones(3))
    kept.store(second, 1, torch.full((3,), 2.0))
    assert kept.current() == {}, "no update holds them"
    copy = KeptResiduals(3)
    copy.restore(*kept.export())
    for one in (kept, copy):
        one.apply(update(0, first, second))
        assert {index: float(found.sum()) for index, found in one.current().items()} == {0: 3.0, 1: 6.0}
        one.apply(update(1, PushId("a", 1), PushId("b", 1)))
        assert one.current() == {}, "a step later it is an old one"


def test_a_residual_is_handed_out_until_a_push_of_its_worker_is_in_an_update():
    kept = KeptResiduals(3)
    kept.begin({0: torch.ones(3), 1: torch.full((3,), 2.0)})
    assert float(kept.hand_out("a", 0).sum()) == 3.0
    assert float(kept.hand_out("instead of a", 0).sum()) == 3.0, "the first was gone before it had sent anything"
    kept.apply(update(0, PushId("instead of a", 0)))
    assert kept.hand_out("third", 0) is None, "it would count twice"
    assert set(kept.current()) == {1}, "nobody has taken the other one"
    kept.store(PushId("b", 0), 1, torch.ones(3))
    kept.discard("b", keep=())
    kept.apply(update(1, PushId("b", 0)))
    assert float(kept.current()[1].sum()) == 6.0


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_sum_is_conserved_for_another_number_of_workers(workers):
    saved = {index: gradient(index) for index in range(2)}
    shared = share_out(saved, saved_workers=2, workers=workers)
    assert torch.equal(sum(shared[index] for index in sorted(shared)), saved[0] + saved[1])
    assert (set(shared) == {0, 1}) == (workers == 2)
