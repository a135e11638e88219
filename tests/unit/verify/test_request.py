"""What is asked to be proved: checked and completed before any process starts."""

import pytest

from shoal.core.errors import RequestError
from shoal.core.plan import Plan
from shoal.optim.config import OptimConfig
from shoal.verify.request import choose_precisions, prepare_verify, server_plans


def texts(request):
    return [(str(proposal.plan), proposal.precision) for proposal in request.proposals]


def test_float64_is_added_where_sums_are_split(tiny):
    request = prepare_verify(tiny, plans=["dp=2", "tp=2", "dp=2 zero=3"])
    assert texts(request) == [
        ("dp=2", "float32"),
        ("dp=1 tp=2", "float32"),
        ("dp=1 tp=2", "float64"),
        ("dp=2 zero=3", "float32"),
    ]
    assert len(request.model_hash) == 64


def test_batch_norm_that_is_synchronised_splits_sums_too(tmp_path):
    path = tmp_path / "normed.toml"
    path.write_text(
        """
        [model]
        name = "mlp"
        batch_norm = true
        [data]
        source = "synthetic"
        kind = "classes"
        samples = 32
        [train]
        steps = 4
        global_batch = 8
        batch_norm = "sync"
        """
    )
    assert texts(prepare_verify(path, plans=["dp=2"])) == [("dp=2", "float32"), ("dp=2", "float64")]
    local = prepare_verify(path, plans=["dp=2"], overrides=["train.batch_norm=local"])
    assert texts(local) == [("dp=2", "float32")]
    with pytest.raises(RequestError, match=r"none of them has a gradient of its own to compress.*batch_norm=local"):
        prepare_verify(path, plans=["dp=2 compress=int8"])


def test_a_given_arithmetic_is_the_only_one(tiny):
    assert texts(prepare_verify(tiny, plans=["tp=2"], precision="bfloat16")) == [("dp=1 tp=2", "bfloat16")]
    with pytest.raises(RequestError, match="float31"):
        choose_precisions(Plan(), "float31", OptimConfig())


def test_an_optimizer_that_moves_roundings_far_is_proved_in_float64_alone(tiny):
    """Its proofs in float32 and bfloat16 said that right plans differ."""
    named = ["optim.name=torch.optim.RMSprop"]
    request = prepare_verify(tiny, plans=["dp=2", "tp=2"], overrides=named)
    assert texts(request) == [("dp=2", "float32"), ("dp=1 tp=2", "float64")]
    for asked in ("float32", "bfloat16"):
        with pytest.raises(
            RequestError, match=f"--dtype {asked} proves nothing with torch.optim.RMSprop.*use --dtype float64"
        ):
            prepare_verify(tiny, plans=["tp=2"], precision=asked, overrides=named)
    centered = [*named, "optim.args.centered=true"]
    assert texts(prepare_verify(tiny, plans=["dp=2"], overrides=centered)) == [("dp=2", "float32")]
    with pytest.raises(RequestError, match=r"with centered moves roundings.*optim\.args\.centered=false"):
        prepare_verify(tiny, plans=["tp=2"], overrides=centered)


def test_without_a_plan_the_recipes_own_is_proved(tiny):
    assert texts(prepare_verify(tiny, num_processes=2)) == [("dp=2", "float32")]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("tp=3", "4 .*heads|heads.* 4"),
        ("dp=3", "global_batch 8 is not divisible by dp 3"),
        ("dp=2 zero=4", "zero=4"),
        ("dp=1 cp=16", "cp=16|sequence"),
        ("dp=two", "whole number"),
    ],
)
def test_a_plan_that_cannot_run_is_refused(tiny, plan, message):
    with pytest.raises(RequestError, match=message):
        prepare_verify(tiny, plans=[plan])


def test_all_takes_what_check_allows(tiny):
    request = prepare_verify(tiny, takes_all=True, num_processes=2)
    plans = {str(proposal.plan) for proposal in request.proposals}
    wanted = {"dp=2", "dp=2 zero=1", "dp=2 zero=2", "dp=2 zero=3", "dp=1 tp=2", "dp=1 tp=2 sp=true", "dp=1 cp=2"}
    assert wanted <= plans
    assert all(proposal.plan.world_size == 2 for proposal in request.proposals)


def test_all_has_a_few_compressed_plans(tiny):
    request = prepare_verify(tiny, takes_all=True, num_processes=2)
    compressed = [str(proposal.plan) for proposal in request.proposals if proposal.plan.compress]
    assert compressed == [
        *("dp=2 compress=int8", "dp=2 zero=1 compress=int4", "dp=2 compress=topk:0.01", "dp=2 compress=powersgd:2"),
    ]
    short = prepare_verify(tiny, takes_all=True, num_processes=2, overrides=["train.steps=2"])
    assert not any(one.plan.compress for one in (*short.proposals, *short.refusals))


def test_compression_that_cannot_be_proved_is_refused(tiny):
    for plan, message, options in [
        ("dp=2 compress=int8@6", r"3 compressed steps are done after 9, and a proof has 8.*compress=int8@1", {}),
        ("dp=2 compress=int8", "sends float32 and less.*float64", {"precision": "float64"}),
        ("dp=2 compress=int4", "float16 scales", {"precision": "float16"}),
    ]:
        with pytest.raises(RequestError, match=f"(?s){message}"):
            prepare_verify(tiny, plans=[plan], **options)
    assert texts(prepare_verify(tiny, plans=["dp=2 compress=none"])) == [("dp=2", "float32")]


def test_all_leaves_out_what_the_batch_does_not_allow_and_says_so(tiny):
    request = prepare_verify(tiny, takes_all=True, num_processes=4, overrides=["train.global_batch=2"])
    assert all((proposal.plan.dp or 1) <= 2 for proposal in request.proposals)
    assert any("not divisible by dp 4" in refusal.reason for refusal in request.refusals)


def test_a_plan_that_the_arithmetic_does_not_allow_takes_no_other_with_it(tiny):
    """One plan of --all that float16 cannot run ended them all."""
    request = prepare_verify(tiny, takes_all=True, num_processes=2, precision="float16")
    assert {proposal.precision for proposal in request.proposals} == {"float16"}
    refused = {str(refusal.plan): refusal.reason for refusal in request.refusals}
    assert "float16 scales its loss" in refused["ps=1 workers=1 update=bsp"]
    assert not any(proposal.plan.ps for proposal in request.proposals)


def test_every_plan_that_was_named_and_cannot_run_is_said_at_once(tiny):
    with pytest.raises(RequestError, match=r"(?s)global_batch 8 is not divisible by dp 3.*(tp 3|tp=3)"):
        prepare_verify(tiny, plans=["dp=3", "tp=3"])


def test_a_named_plan_that_cannot_run_takes_no_other_with_it(tiny):
    """`--plan dp=1 --plan tp=7` proved nothing and wrote no certificate."""
    request = prepare_verify(tiny, plans=["dp=2", "dp=3"])
    assert texts(request) == [("dp=2", "float32")]
    assert [(str(one.plan), "not divisible by dp 3" in one.reason) for one in request.refusals] == [("dp=3", True)]


@pytest.mark.parametrize("trained", ["bfloat16", "float16", "float64"])
def test_what_the_recipe_trains_in_is_proved(tiny, trained):
    """A recipe in bfloat16 was proved in float32, and nobody was told."""
    request = prepare_verify(tiny, plans=["dp=2", "tp=2"], overrides=[f"train.precision={trained}"])
    wanted = [("dp=2", trained), ("dp=1 tp=2", trained), ("dp=1 tp=2", "float64")]
    assert texts(request) == wanted[: 2 if trained == "float64" else 3] and request.warnings == ()
    other = prepare_verify(tiny, plans=["tp=2"], precision="float32", overrides=[f"train.precision={trained}"])
    assert texts(other) == [("dp=1 tp=2", "float32")]


def test_what_cannot_be_proved_in_the_recipes_own_arithmetic_is_said(tiny):
    named = ["optim.name=torch.optim.RMSprop", "train.precision=bfloat16"]
    request = prepare_verify(tiny, plans=["dp=2", "tp=2"], overrides=named)
    assert texts(request) == [("dp=2", "bfloat16"), ("dp=1 tp=2", "float64")]
    (warning,) = request.warnings
    assert "plan 'dp=1 tp=2' is not proved in bfloat16" in warning
    plan = "pp=2 schedule=pipedream microbatches=4"
    with pytest.raises(RequestError, match=r"train.precision float16|precision"):
        prepare_verify(tiny, plans=[plan], overrides=["train.precision=float16"])


def test_parameter_servers_are_completed_like_other_plans(tiny):
    request = prepare_verify(tiny, plans=["ps=1", "ps=2 workers=2 update=half backup=1"])
    assert texts(request) == [
        ("ps=1 workers=2 update=bsp", "float32"),
        ("ps=2 workers=2 update=half:2,0.25 backup=1", "float32"),
    ]


@pytest.mark.parametrize(
    ("plan", "overrides", "message"),
    [
        ("ps=1 workers=2 update=downpour:2,2", ["paramserver.overlap=true"], "overlap=false"),
        ("ps=1 workers=2 update=lbfgs", [], "update=lbfgs is not proved by verify, which proves bsp, ssp"),
        ("ps=1 workers=3", [], "global_batch 8 is not divisible by workers 3"),
        ("ps=1 workers=2", ["paramserver.aggregate=adasum"], "paramserver.aggregate adasum is not proved"),
        ("ps=1 workers=2 update=async", ["paramserver.delay_compensation=0.1"], "set paramserver.delay_compensation=0"),
        ("ps=1 workers=2", ["optim.clip=1"], "optim.clip 1"),
        ("ps=1 workers=2 backup=1", [], "backup=1 needs 2 servers"),
    ],
)
def test_servers_that_cannot_be_proved_are_refused(tiny, plan, overrides, message):
    with pytest.raises(RequestError, match=message):
        prepare_verify(tiny, plans=[plan], overrides=overrides)


def test_no_loss_is_scaled_by_workers(tiny):
    with pytest.raises(RequestError, match="float16 scales its loss, which workers of ps=1"):
        prepare_verify(tiny, plans=["ps=1 workers=2"], precision="float16")


def test_all_has_every_rule_of_parameter_servers(tiny):
    request = prepare_verify(tiny, takes_all=True, num_processes=3)
    plans = [str(proposal.plan) for proposal in request.proposals if proposal.plan.ps]
    assert plans == [
        *(f"ps=1 workers=2 update={rule}" for rule in ("bsp", "ssp:1", "async", "half:2,0.25", "downpour:2,2")),
        # In float32 and float64: it splits sums.
        *["tp=2 ps=1 workers=1 update=bsp"] * 2,
        "pp=2 ps=1 workers=1 update=bsp",
    ]
    assert [str(plan) for plan in server_plans(2)] == ["ps=1 workers=1 update=bsp", "ps=1 workers=1 update=async"]
    assert server_plans(1) == [] and "ps=2 workers=2 update=bsp backup=1" in map(str, server_plans(4))


def test_rounds_that_follow_evaluations_are_refused_because_a_proof_makes_none(tiny):
    settings = ["replicas.interval=adacomm", "eval.every=2"]
    with pytest.raises(RequestError, match=r"adacomm follows evaluations.*replicas\.interval=fixed"):
        prepare_verify(tiny, plans=["dp=2 sync=local:3"], overrides=settings)
