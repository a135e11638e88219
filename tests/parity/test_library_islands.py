"""Islands in a script's own loop (``shoal.Run``): its weights are those of a plain loop that plays both islands."""

import numpy as np
import pytest
import torch
from torch import nn

import shoal
from shoal.core.errors import RequestError
from shoal.core.events import Warned
from shoal.core.syncrule import SyncRule
from shoal.data.order import permute
from shoal.replicas.config import ReplicaConfig
from shoal.testing.ranks import run_on_ranks
from shoal.verify.oracle.islands import Agreement

BATCH, STEPS, SEED = 16, 13, 3
CASES = (
    ("dp=2 sync=diloco:5", {}),
    ("islands=2 dp=1 sync=stream:4,2,1", {"mixing": 0.25}),
    ("islands=2 sync=pushsum:random", {}),
)
COSTLY = "compress=topk:0.1 under AdamW is about as good as one replica alone"


def build():
    torch.manual_seed(SEED)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3))


def dataset():
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(8, generator=generator), index % 3) for index in range(48)]


def optimizer_of(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)


def plain(plan, settings):
    """Both islands in one process, with torch's own loop and the oracle's rule between them."""
    models, data, loss_of = [build(), build()], dataset(), nn.CrossEntropyLoss()
    made = [optimizer_of(model) for model in models]
    rule = SyncRule.parse(plan.partition("sync=")[2])
    values = ReplicaConfig(**settings).model_dump(mode="json")
    agreement = Agreement(rule, values, [dict(model.named_parameters()) for model in models], seed=SEED)
    losses = [[], []]
    for step in range(STEPS):
        epoch, start = divmod(step * BATCH, len(data))
        order = permute(SEED, epoch, len(data), np.arange(len(data), dtype=np.int64))[start : start + BATCH]
        lr = made[0][0].param_groups[0]["lr"]
        for number, (model, ids) in enumerate(zip(models, np.split(order, 2), strict=True)):
            made[number][0].zero_grad()
            loss = loss_of(model(torch.stack([data[i][0] for i in ids])), torch.tensor([data[i][1] for i in ids]))
            loss.backward()
            losses[number].append(float(loss.detach()))
        agreement.before_update()
        for optimizer, _ in made:
            optimizer.step()
        agreement.after_update(step, lr, [BATCH // 2] * 2)
        for _, scheduler in made:
            scheduler.step()
    return losses, [{name: one.detach().clone() for name, one in model.named_parameters()} for model in models]


def own_loop(world, plan, settings, *, whole_step, run_dir=None, until=STEPS):
    with shoal.Run(plan=plan, seed=SEED, world=world, replicas=settings, run_dir=run_dir, resume=bool(run_dir)) as run:
        model = build()
        optimizer, scheduler = optimizer_of(model)
        loader = run.loader(dataset(), global_batch=BATCH)
        model, optimizer, scheduler = run.setup(model, optimizer, scheduler, loss=nn.CrossEntropyLoss())
        losses = []
        for batch in loader.steps(until - run.step_count):
            if whole_step:
                losses.append(run.step(batch).loss)
            else:
                losses.append(run.forward_backward(batch))
                optimizer.step()
                scheduler.step()
        own = {name: one.detach().clone() for name, one in model.named_parameters()}
        return {"losses": losses, "weights": own, "mean": run.state_dict()}


def all_cases(world, folder):
    found = [own_loop(world, plan, settings, whole_step=whole) for plan, settings in CASES for whole in (True, False)]
    # Saved in the middle of a round, with a fragment under way in stream, and taken up again.
    for number, (plan, settings) in enumerate(CASES):
        place = f"{folder}/{number}"
        own_loop(world, plan, settings, whole_step=True, run_dir=place, until=8)
        found.append(own_loop(world, plan, settings, whole_step=True, run_dir=place))
    return found


def test_a_script_with_islands_is_a_plain_loop_that_plays_them(tmp_path):
    ranks = run_on_ranks(all_cases, 2, str(tmp_path), deadline_seconds=120.0)
    wanted = [plain(plan, settings) for plan, settings in CASES]
    for island, found in enumerate(ranks):
        for number, (losses, weights) in enumerate(wanted):
            for one in (found[2 * number], found[2 * number + 1]):
                assert one["losses"] == losses[island], (CASES[number], island)
                assert all(torch.equal(one["weights"][name], weights[island][name]) for name in weights[island])
                assert all(torch.equal(ranks[0][2 * number]["mean"][name], one["mean"][name]) for name in one["mean"])
            resumed = found[2 * len(CASES) + number]
            assert resumed["losses"] == losses[island][8:], CASES[number]
            assert all(torch.equal(resumed["weights"][name], weights[island][name]) for name in weights[island])


def warned(world, plan):
    """What a run of two models says before its first step."""
    said = []
    with shoal.Run(plan=plan, world=world, compression={"min_elements": 8}) as run:
        run.loader(dataset(), global_batch=BATCH)
        heard = run._reporter.event
        run._reporter.event = lambda event: heard(said.append(event) or event)
        for _ in range(2):
            run.setup(*optimizer_of_new(), loss=nn.CrossEntropyLoss())
    return [event.message for event in said if isinstance(event, Warned)]


def optimizer_of_new():
    model = build()
    return model, torch.optim.AdamW(model.parameters())


def test_a_way_to_agree_that_costs_more_than_it_brings_is_told_once_in_scripts_too():
    assert [COSTLY in one for one in run_on_ranks(warned, 2, "dp=2 compress=topk:0.1")[0]] == [True]


def two_models(world):
    with shoal.Run(plan="dp=2 sync=local:2", world=world) as run:
        run.loader(dataset(), global_batch=BATCH)
        for number in range(2):
            model = build()
            try:
                run.setup(
                    model, torch.optim.SGD(model.parameters(), lr=0.1), loss=nn.CrossEntropyLoss(), name=f"m{number}"
                )
            except RequestError as error:
                return str(error)
    return ""


@pytest.mark.soak
def test_islands_are_of_one_model():
    assert "islands with sync=local:2 are of one model" in run_on_ranks(two_models, 2)[0]


def test_settings_that_the_policy_cannot_carry_out_are_refused_as_in_recipes():
    said = r"replicas.interval qsr lengthens or shortens the rounds of sync=local:H, and here sync=diloco:4"
    with pytest.raises(RequestError, match=said):
        shoal.Run(plan="dp=2 sync=diloco:4", replicas={"interval": "qsr"})
    with pytest.raises(RequestError, match=r"replicas.weigh samples is for the mean"):
        shoal.Run(plan="dp=2 sync=gossip:ring", replicas={"weigh": "samples"})
    shoal.Run(plan="dp=2 sync=local:4", replicas={"interval": "qsr", "weigh": "samples"})
