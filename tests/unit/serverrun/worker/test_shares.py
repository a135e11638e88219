"""A share of a step is the same samples, whoever computes it and in whatever order: those that a replica would have read."""

from itertools import chain

import numpy as np
import pytest
import torch
from torch import nn

from shoal.core.errors import RequestError
from shoal.data.loading.loader import Loader
from shoal.data.order import Position, position_of, take
from shoal.data.source import Items
from shoal.models.embeddings import make_dense
from shoal.paramserver.config import ParamServerConfig
from shoal.paramserver.sharding import cut_model
from shoal.paramserver.worker.flat import FlatModel, describe_model, refuse_batch_norm, sparse_parameters
from shoal.serverrun.worker.connection import make_packer
from shoal.serverrun.worker.shares import ShareRunner


class Numbers:
    """Samples that are their own number."""

    def __init__(self, count, uniform):
        self._count, self.uniform_weight = count, 1 if uniform else None

    def __len__(self):
        return self._count

    def collate(self, ids):
        tensor = torch.as_tensor(np.asarray(ids, dtype=np.int64))
        weight = len(tensor) if self.uniform_weight else int((tensor % 3 + 1).sum())
        return Items(inputs=(tensor,), targets=tensor, weight=weight)


class Recording:
    """In the place of a parallel model: keeps the batches that it is given."""

    def __init__(self):
        self.batches, self.runtime = [], None

    def forward_backward(self, batch, *, step):
        self.batches.append((step, batch))
        return 0.5


@pytest.mark.parametrize("uniform", [True, False], ids=["samples weigh the same", "they do not"])
@pytest.mark.parametrize("samples", [23, 24])
def test_every_share_is_what_that_replica_would_have_loaded(uniform, samples):
    source, recording = Numbers(samples, uniform), Recording()
    shares = ShareRunner(recording, source, seed=3, global_batch=8, num_shares=2, num_microbatches=2, of_the_step=True)
    steps = [(step, share) for step in range(7) for share in range(2)]
    for step, share in reversed(steps):
        shares.run(step, share)
    found = {}
    for (step, share), (given, batch) in zip(reversed(steps), recording.batches, strict=True):
        assert given == step
        found[step, share] = batch
    for share in range(2):
        loader = Loader(source, global_batch=8, micro_batch=2, replica=share, num_replicas=2, seed=3, prefetch=0)
        for step in range(7):
            wanted, batch = loader.next(), found[step, share]
            assert [list(one.sample_ids) for one in batch.microbatches] == [
                list(one.sample_ids) for one in wanted.microbatches
            ]
            assert [one.weight for one in batch.microbatches] == [one.weight for one in wanted.microbatches]
            assert batch.num_samples == wanted.num_samples
    for step in range(7):
        total = sum(found[step, share].local_weight for share in range(2))
        assert {found[step, share].total_weight for share in range(2)} == {total}


def test_a_share_that_is_an_update_by_itself_is_weighted_by_itself():
    recording = Recording()
    shares = ShareRunner(
        recording, Numbers(24, False), seed=3, global_batch=8, num_shares=2, num_microbatches=1, of_the_step=False
    )
    result = shares.run(0, 1)
    (_, batch), *_ = recording.batches
    assert batch.total_weight == batch.local_weight == result.weight and result.mean_loss == 0.5


@pytest.mark.parametrize(("has_schedule", "sizes"), [(False, [2, 2, 1]), (True, [3, 2])])
def test_a_span_has_microbatches_of_one_size_or_as_many_as_a_schedule(has_schedule, sizes):
    recording = Recording()
    recording.runtime = object() if has_schedule else None
    shares = ShareRunner(
        recording, Numbers(24, False), seed=3, global_batch=8, num_shares=2, num_microbatches=2, of_the_step=True
    )
    assert shares.run_span(1, 2, 7) == 0.5
    (_, batch), *_ = recording.batches
    assert [len(one.sample_ids) for one in batch.microbatches] == sizes


@pytest.mark.parametrize("samples", [7, 8, 21])
def test_the_position_of_a_step_is_where_the_steps_before_it_lead(samples):
    position = Position()
    for step in range(12):
        assert position_of(step, samples, 4) == position
        _, position = take(position, samples, 4)


def test_a_model_in_one_row_computes_as_before_and_its_shards_are_slices():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    inputs = torch.randn(4, 16)
    wanted = model(inputs)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    shard_map = cut_model(describe_model(model), 3)
    flat = FlatModel(model, shard_map)
    assert torch.equal(model(inputs), wanted)
    assert [span.stop - span.start for span in flat.spans] == [shard.numel for shard in shard_map.shards]
    for shard, span in zip(shard_map.shards, flat.spans, strict=True):
        part = flat.weights[span]
        for piece in shard.pieces:
            own = part[piece.offset : piece.offset + piece.numel]
            assert torch.equal(own, before[piece.name].reshape(-1)[piece.start : piece.stop])
    model(inputs).sum().backward()
    model[0].weight.grad = None
    gradient = flat.collect_gradient()
    assert torch.equal(gradient[flat._places["2.weight"]], model[2].weight.grad.reshape(-1))
    assert not gradient[flat._places["0.weight"]].any()
    flat.weights.zero_()
    assert not model(inputs).any()


def test_running_statistics_are_refused_by_name():
    with pytest.raises(RequestError, match=r"batch norm '1' keeps running statistics"):
        refuse_batch_norm(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)))
    refuse_batch_norm(nn.Sequential(nn.BatchNorm1d(1, track_running_stats=False)))


class Table(nn.Module):
    def __init__(self, *, sparse):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(40, 3, sparse=sparse)
        self.out = nn.Linear(3, 2)

    def forward(self, ids):
        return self.out(self.table(ids)).sum()


def test_an_embedding_that_asks_for_rows_is_collected_whole_and_sent_as_rows():
    """A worker died of it: torch does not copy a sparse tensor into a dense one."""
    found = {}
    for sparse in (False, True):
        model = Table(sparse=sparse)
        names = sparse_parameters(model)
        make_dense(model)
        flat = FlatModel(model, cut_model(describe_model(model), 2), names)
        # From an earlier work unit, which touched other rows.
        flat.gradient.fill_(7.0)
        for ids in ([3, 5, 3], [17, 5]):
            model(torch.tensor(ids)).backward()
        found[sparse] = flat.collect_gradient(), make_packer(flat, ParamServerConfig())
    assert torch.equal(found[True][0], found[False][0])
    assert found[False][1] is None
    assert found[True][1].sparse_names() == {"table.weight"}
    gradient, packer = found[True]
    shards = [packer.pack(number, gradient[span]) for number, span in enumerate(flat.spans)]
    assert sum(count for index, _ in shards for _, count in index) == 3


@pytest.mark.parametrize("samples", [23, 24])
def test_shares_of_unequal_size_are_every_sample_of_a_step_once(samples):
    source, recording = Numbers(samples, uniform=False), Recording()
    options = {"seed": 3, "global_batch": 8, "num_shares": 3, "num_microbatches": 1, "of_the_step": True}
    shares = ShareRunner(recording, source, sizes=(4.0, 2.0, 2.0), **options)
    equal = ShareRunner(recording, source, **options)
    for step in range(6):
        results = [shares.run(step, share) for share in range(3)]
        ids = [list(one.sample_ids) for _, batch in recording.batches[-3:] for one in batch.microbatches]
        totals = {batch.total_weight for _, batch in recording.batches[-3:]}
        whole = [equal.run(step, share) for share in range(3)]
        wanted = [list(one.sample_ids) for _, batch in recording.batches[-3:] for one in batch.microbatches]
        assert [*chain(*ids)] == [*chain(*wanted)] and len(totals) == 1, "each counts by its samples of the whole step"
        assert sum(one.samples for one in results) == sum(one.samples for one in whole)
        if sum(one.samples for one in results) == 8:
            assert [one.samples for one in results] == [4, 2, 2]
    shares.run(0, 0, part=1, num_parts=2)
    assert len(recording.batches[-1][1].microbatches[0].sample_ids) == 2
