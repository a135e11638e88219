"""Errors as a proof measures them: relative per tensor, noise bounded absolutely, weights of normalising optimizers by their
own rule."""

import math
from dataclasses import replace

import pytest
import torch

from shoal.core.plan import Plan
from shoal.optim.config import OptimConfig
from shoal.verify.compare.tensors import Comparer, nothing_known
from shoal.verify.compare.tolerance import derive_tolerance
from shoal.verify.reference.recording import Step


def tolerance_of(text, precision="float32", *, depth=4, adds_in_order=True, joins=False, name="adamw", args=None):
    return derive_tolerance(
        Plan.parse(text),
        precision=precision,
        depth=depth,
        adds_in_order=adds_in_order,
        joins_replicas=joins,
        optim=OptimConfig(name=name, args=args or {}, lr=1e-2),
        total_steps=10,
        steps=3,
    )


def step_of(loss=2.0, norm=1.0, skipped=False, **tensors):
    return Step(
        loss=loss, norm=norm, skipped=skipped, tensors={key.replace("__", "/"): value for key, value in tensors.items()}
    )


def compare(reference, found, tolerance):
    comparer = Comparer(tolerance)
    return comparer.add(0, reference, found), comparer.comparison


@pytest.mark.parametrize(
    ("plan", "precision", "in_order", "bound"),
    [
        ("dp=2", "float32", False, 0.0),
        ("dp=4 zero=3", "float32", True, 0.0),
        ("dp=3", "float32", False, 1e-6),
        ("dp=2", "bfloat16", False, 0.0),
        ("dp=1 tp=2", "float32", True, 1e-5),
        ("dp=1 tp=2", "float64", True, 1e-12),
        ("dp=2 cp=2", "float64", True, 1e-12),
        ("dp=1 pp=4 schedule=chimera microbatches=4", "float32", False, 0.0),
        ("dp=2 pp=2 schedule=pipedream microbatches=4", "bfloat16", False, 0.0),
        ("dp=1 tp=2 pp=2", "float32", True, 1e-5),
    ],
)
def test_the_bound_is_the_laws(plan, precision, in_order, bound):
    assert tolerance_of(plan, precision, adds_in_order=in_order).bound == bound


def test_each_microbatch_of_pipedream_may_go_a_step():
    plain, delayed = (
        tolerance_of(f"dp=3 pp=2 schedule={name} microbatches=4", adds_in_order=False) for name in ("1f1b", "pipedream")
    )
    assert delayed.reach(0) == pytest.approx(4 * plain.reach(0)) != 0


def test_the_bound_of_bfloat16_grows_with_the_root_of_the_depth():
    shallow, deep = (tolerance_of("dp=1 tp=2", "bfloat16", depth=depth).bound for depth in (2, 32))
    assert deep / shallow == pytest.approx(4.0)
    assert 0.01 < shallow < 0.2


def test_synchronised_batch_norm_has_no_tree_to_keep():
    assert tolerance_of("dp=2", joins=True).bound == 1e-5


def test_one_bit_fails_a_bitwise_plan():
    grad = torch.ones(4)
    other = grad.clone()
    other[3] = torch.nextafter(other[3], torch.tensor(2.0))
    wrong, comparison = compare(step_of(grad__a=grad), step_of(grad__a=other), tolerance_of("dp=2"))
    assert [(one.kind, one.name) for one in wrong] == [("grad", "a")]
    assert not comparison.is_bitwise
    wrong, comparison = compare(step_of(grad__a=grad), step_of(grad__a=grad.clone()), tolerance_of("dp=2"))
    assert wrong == [] and comparison.is_bitwise


def test_a_split_sum_may_differ_by_its_bound_and_no_more():
    grad = torch.ones(100, dtype=torch.float64).float()
    near, far = grad * (1 + 5e-6), grad * (1 + 2e-5)
    wrong, comparison = compare(step_of(grad__a=grad), step_of(grad__a=near), tolerance_of("dp=1 tp=2"))
    assert wrong == [] and not comparison.is_bitwise and 4e-6 < comparison.worst["grad"] < 6e-6
    wrong, _ = compare(step_of(grad__a=grad), step_of(grad__a=far), tolerance_of("dp=1 tp=2"))
    assert len(wrong) == 1


def test_nan_is_wrong_under_every_tolerance():
    grad = torch.ones(4)
    wrong, comparison = compare(step_of(grad__a=grad), step_of(grad__a=grad * math.nan), tolerance_of("dp=1 tp=2"))
    assert len(wrong) == 1 and comparison.worst["grad"] == math.inf
    wrong, _ = compare(step_of(loss=1.0), step_of(loss=math.nan), tolerance_of("dp=1 tp=2"))
    assert [one.kind for one in wrong] == ["loss"]


def test_a_tiny_gradient_is_noise_and_bounded_absolutely():
    big, tiny = torch.ones(100), torch.full((4,), 1e-8)
    reference = step_of(grad__big=big, grad__tiny=tiny)
    within = step_of(grad__big=big.clone(), grad__tiny=-tiny)
    wrong, comparison = compare(reference, within, tolerance_of("dp=1 tp=2"))
    assert wrong == [] and comparison.noise == {"grad/tiny": pytest.approx(4e-8)} and comparison.worst["grad"] == 0.0
    beyond = step_of(grad__big=big.clone(), grad__tiny=torch.full((4,), 1e-3))
    wrong, _ = compare(reference, beyond, tolerance_of("dp=1 tp=2"))
    assert [one.name for one in wrong] == ["tiny"]


def test_noise_is_no_excuse_for_a_bitwise_plan():
    big, tiny = torch.ones(100), torch.full((4,), 1e-8)
    wrong, _ = compare(
        step_of(grad__big=big, grad__tiny=tiny),
        step_of(grad__big=big.clone(), grad__tiny=-tiny),
        tolerance_of("dp=2"),
    )
    assert [one.name for one in wrong] == ["tiny"]


def test_a_weight_whose_gradient_is_noise_may_go_one_step_the_other_way_and_no_further():
    """The bias of attention's keys: its gradient is zero but for rounding, and Adam makes a whole step of it."""
    grad = torch.ones(100)
    grad[:10] = 1e-7
    other = grad.clone()
    other[:10] *= -1
    weight = torch.zeros(100)
    weight[10:] = 1e-2
    moved, lost = weight.clone(), weight.clone()
    moved[:10] += 1.5e-2
    lost[:10] += 1.0
    tolerance = tolerance_of("dp=1 tp=2")
    assert compare(step_of(grad__a=grad, weight__a=weight), step_of(grad__a=other, weight__a=moved), tolerance)[0] == []
    wrong, _ = compare(step_of(grad__a=grad, weight__a=weight), step_of(grad__a=other, weight__a=lost), tolerance)
    assert [one.kind for one in wrong] == ["weight"]
    # Of the same gradient every rule makes the same step.
    wrong, _ = compare(step_of(grad__a=grad, weight__a=weight), step_of(grad__a=grad, weight__a=moved), tolerance)
    assert [one.kind for one in wrong] == ["weight"]
    # A rule that does not divide by the size of a gradient has no such excuse.
    plain = tolerance_of("dp=1 tp=2", name="sgd")
    assert len(compare(step_of(grad__a=grad, weight__a=weight), step_of(grad__a=other, weight__a=moved), plain)[0]) == 1


@pytest.mark.parametrize(
    ("name", "args", "key", "size"),
    [
        ("RMSprop", {"momentum": 0.9, "eps": 1e-12}, "momentum_buffer", 10.0),
        ("RMSprop", {"momentum": 0.9, "eps": 1e-12, "centered": True}, "momentum_buffer", 10.0 / math.sqrt(0.99)),
        ("Rprop", {}, "step_size", 1.2e-2),
    ],
)
def test_state_of_quotients_is_judged_as_weights_are(name, args, key, size):
    """RMSprop was said to differ: the momentum of an element whose gradient is noise is ten in either direction."""
    grad = torch.ones(100)
    grad[:10] = 1e-9
    noise = grad.clone()
    noise[:10] *= -1
    state = torch.full((100,), size)
    moved, lost, other, broken = (state.clone() for _ in range(4))
    moved[:10] -= 1.99 * size
    lost[:10] -= 2.1 * size
    other[50] *= 1.01
    broken[0] = math.nan
    tolerance = tolerance_of("dp=1 tp=2", name=f"torch.optim.{name}", args=args)
    reference = step_of(grad__a=grad, **{f"optimizer__a__{key}": state})
    for found, is_right in ((moved, True), (lost, False), (other, False), (broken, False)):
        wrong, _ = compare(reference, step_of(grad__a=noise, **{f"optimizer__a__{key}": found}), tolerance)
        assert [one.kind for one in wrong] == ([] if is_right else ["optimizer"])


@pytest.mark.parametrize(("kind", "reach"), [("optimizer__a__momentum_buffer", 20.0), ("weight__a", 0.2)])
def test_a_quotient_is_known_as_well_as_its_gradient_and_no_better(kind, reach):
    """RMSprop was said to differ by 1.2e-12 on one kind of processor: an element's gradient was a few times the noise."""
    arguments = {"momentum": 0.9, "eps": 1e-16}
    tolerance = tolerance_of("dp=1 tp=2", name="torch.optim.RMSprop", args=arguments, precision="float64")
    limit = 10 * torch.finfo(torch.float64).eps * 10
    grad, state = torch.ones(100, dtype=torch.float64), torch.full((100,), 10.0, dtype=torch.float64)
    grad[0] = 50 * limit
    rounded = grad.clone()
    rounded[0] += 0.5 * limit
    near, far, elsewhere = (state.clone() for _ in range(3))
    # As far as both runs can be from each other, of which a rounding of a hundredth of the gradient makes two.
    near[0] += 0.9 * reach / 50
    far[0] += 1.2 * reach / 50
    elsewhere[1] += 2e-10
    reference = step_of(grad__a=grad, **{kind: state})
    for found, is_right in ((near, True), (far, False), (elsewhere, False)):
        wrong, _ = compare(reference, step_of(grad__a=rounded, **{kind: found}), tolerance)
        assert bool(wrong) is not is_right
    # Of the same gradient every rule makes the same quotient.
    assert compare(reference, step_of(grad__a=grad, **{kind: near}), tolerance)[0]


def test_an_element_that_is_zero_by_accident_is_noise_where_the_plan_has_noise():
    """ViT under tp=2 was said to differ: of the bias of keys one element of the reference's gradient was exactly zero."""
    tolerance = tolerance_of("dp=1 tp=2", precision="float64")
    whole, noise = torch.ones(100, dtype=torch.float64), torch.full((4,), 3e-18, dtype=torch.float64)
    noise[1] = 0.0
    other = -noise
    other[1] = 2e-18
    # Adam's first step with its eps.
    weight, moved = (-1e-2 * one / (one.abs() + 1e-8) for one in (noise, other))
    reference = step_of(grad__a=whole, grad__key=noise, weight__key=weight)
    wrong, comparison = compare(reference, step_of(grad__a=whole, grad__key=other, weight__key=moved), tolerance)
    assert wrong == [] and set(comparison.noise) == {"grad/key", "weight/key"} and comparison.worst["weight"] == 0.0
    # A row that no token touched has zeros in both runs, and its weight stays.
    still = other.clone()
    still[1] = 0.0
    wrong, _ = compare(reference, step_of(grad__a=whole, grad__key=still, weight__key=moved), tolerance)
    assert [one.kind for one in wrong] == ["weight"]


LINEAR = [
    ("sgd", "weight__key", 1e-2),
    ("momentum", "optimizer__key__momentum_buffer", 1.0),
    ("torch.optim.Adamax", "optimizer__key__exp_inf", 1.0),
    ("torch.optim.ASGD", "optimizer__key__ax", 1e-2),
    ("adamw", "optimizer__key__exp_avg", 0.1),
]


@pytest.mark.parametrize(("name", "kind", "factor"), LINEAR)
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_what_is_linear_in_a_gradient_may_be_off_by_its_rounding_and_no_more(name, kind, factor, precision):
    """BERT under plain sgd and tp=2 was said to differ: the bias of keys is the rate times a noise."""
    tolerance = tolerance_of("dp=1 tp=2", precision=precision, name=name)
    kept = getattr(torch, precision)
    whole = torch.ones(100, dtype=kept)
    # As the gradient of keys: far below the limit, of which there are thousands of elements, all of them noise.
    noise = torch.full((5000,), 0.3 * 10 * tolerance.eps * 10, dtype=kept) * torch.where(
        torch.arange(5000) % 2 == 0, 1, -1
    )
    noise = noise / math.sqrt(5000)
    reference = step_of(grad__a=whole, grad__key=noise, **{kind: factor * noise})
    wrong, comparison = compare(
        reference, step_of(grad__a=whole, grad__key=-noise, **{kind: -factor * noise}), tolerance
    )
    assert wrong == [] and kind.replace("__", "/") in comparison.noise
    # A planted update that is tiny beside every other weight's, and a thousand times what rounding can do.
    planted = factor * noise
    planted[7] += 1e3 * factor * noise[0].abs()
    wrong, _ = compare(reference, step_of(grad__a=whole, grad__key=-noise, **{kind: planted}), tolerance)
    assert [one.kind for one in wrong] == [kind.partition("__")[0]]


def test_a_buffer_follows_the_weights_that_rounding_moved():
    """Batch norm under dp=2 and sync was said to differ: its mean is that of features with the bias that it then takes off."""
    tolerance = tolerance_of("dp=1 tp=2", precision="float64")
    whole, noise = torch.ones(100, dtype=torch.float64), torch.full((4,), 1e-18, dtype=torch.float64)
    bias, mean = torch.full((4,), 1e-12, dtype=torch.float64), torch.full((4,), 0.1, dtype=torch.float64)
    cases = [("mean", -1, 0.2, True), ("mean", -1, 20.0, False), ("mean", 1, 0.2, False), ("var", -1, 0.2, False)]
    for which, sign, factor, is_right in cases:
        comparer, name = Comparer(tolerance), f"buffer__norm.running_{which}"
        comparer = Comparer(tolerance)
        comparer.add(
            0,
            step_of(grad__a=whole, grad__bias=noise, weight__bias=bias, **{name: mean}),
            step_of(grad__a=whole, grad__bias=-noise, weight__bias=sign * bias, **{name: mean}),
        )
        wrong = comparer.add(1, step_of(**{name: mean}), step_of(**{name: mean + factor * 4 * bias}))
        assert ([one.kind for one in wrong] == []) is is_right


DIVIDING = ["adam", "adamw", "adagrad", *(f"torch.optim.{name}" for name in ("NAdam", "RAdam", "Adamax", "RMSprop"))]


@pytest.mark.parametrize("name", DIVIDING)
def test_noise_goes_no_further_than_eps_lets_it(name):
    """A bias before batch norm that went a whole step too far was proven in float64: noise may go a step in either direction. But
    Adam divides a gradient of 1e-15 by its eps, which leaves 1e-7 of a step."""
    tolerance = tolerance_of("dp=1 tp=2", precision="float64", name=name)
    whole, noise = torch.full((100,), 0.1, dtype=torch.float64), torch.full((4,), 1e-18, dtype=torch.float64)
    found, weight = -noise, torch.ones(4, dtype=torch.float64)
    # As the rule itself computes it of both gradients.
    honest = 2 * 1e-2 * noise / tolerance.divisor
    assert tolerance.divisor == (1e-10 if name == "adagrad" else 1e-8)
    for apart, is_right in ((honest, True), (100 * honest, False), (1e-2, False)):
        comparer, unit = Comparer(tolerance), 1e-3 * honest
        reference = step_of(grad__a=whole, grad__bias=noise, weight__bias=unit * weight)
        plan = step_of(grad__a=whole, grad__bias=found, weight__bias=unit * weight + apart)
        wrong = comparer.add(0, reference, plan)
        assert [one.name for one in wrong] == ([] if is_right else ["bias"])
        if is_right:
            assert comparer.comparison.noise["weight/bias"] == pytest.approx(float(honest.norm())), (
                "as it is, unexcused"
            )


def test_rules_that_do_not_divide_by_an_eps_have_no_such_limit():
    for name in ("lamb", "torch.optim.Rprop", "sgd"):
        assert tolerance_of("dp=1 tp=2", name=name).divisor == 0.0
    assert tolerance_of("dp=1 tp=2", name="torch.optim.Adam", args={"eps": 1e-4}).divisor == 1e-4


def test_a_decay_that_is_added_to_gradients_makes_more_of_noise():
    """Adam with weight decay: what both runs' weights are apart is in their next gradients, divided by eps again."""
    weights = [torch.zeros(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    rules = [torch.optim.Adam([weight], lr=1e-2, weight_decay=0.1) for weight in weights]
    whole = torch.full((100,), 0.1, dtype=torch.float64)
    for name, is_right in (("adam", True), ("adamw", False)):
        optim = OptimConfig(name=name, lr=1e-2, weight_decay=0.1)
        options = {"depth": 1, "adds_in_order": True, "joins_replicas": False, "total_steps": 10, "steps": 3}
        comparer = Comparer(derive_tolerance(Plan.parse("dp=1 tp=2"), precision="float64", optim=optim, **options))
        wrong = []
        for weight, rule in zip(weights, rules, strict=True):
            weight.data.zero_()
            rule.state.clear()
        for index in range(3):
            steps = []
            for sign, weight, rule in zip((1, -1), weights, rules, strict=True):
                weight.grad = torch.full_like(weight, sign * 1e-16)
                gradient = weight.grad.clone()
                rule.step()
                steps.append(step_of(grad__a=whole, grad__w=gradient, weight__w=weight.detach().clone()))
            wrong += comparer.add(index, *steps)
        assert (wrong == []) is is_right


def test_of_several_updates_in_a_step_each_counts():
    """PipeDream has as many updates as microbatches: after t of them a rounding counts sqrt(t) times."""
    plain, delayed = (
        tolerance_of(f"dp=1 tp=2 pp=2 schedule={name} microbatches=4", precision="float64")
        for name in ("1f1b", "pipedream")
    )
    gradient = torch.full((4,), 1e-6, dtype=torch.float64)
    found = []
    for tolerance in (plain, delayed):
        known = nothing_known(gradient)
        known.add(0, gradient, gradient + 1e-14, 1e-14, tolerance)
        found.append(float(known.doubt[0]))
    assert found[0] > 0 and found[1] / found[0] == pytest.approx(2.0)


def test_the_squares_of_noise_are_noise():
    whole, noise = torch.ones(100, dtype=torch.float64), torch.full((4,), 3e-16, dtype=torch.float64)
    tolerance = tolerance_of("dp=1 tp=2", precision="float64")
    reference = step_of(grad__a=whole, grad__key=noise, optimizer__key__exp_avg_sq=1e-3 * noise**2)
    for size, is_right in ((2.0, True), (40.0, False)):
        found = step_of(grad__a=whole, grad__key=size * noise, optimizer__key__exp_avg_sq=1e-3 * (size * noise) ** 2)
        found.tensors["optimizer/key/exp_avg_sq"] *= 1.0 if is_right else 1e3
        wrong, _ = compare(reference, found, tolerance)
        assert ([one.kind for one in wrong] == []) is is_right


def test_a_gradient_above_noise_where_the_reference_has_noise_excuses_nothing():
    """A bug in a tensor of tiny gradients: too small for the gradient's own bound, and Adam makes a whole step of it."""
    grad = torch.ones(100, dtype=torch.float64)
    grad[0] = 1e-20
    planted = grad.clone()
    planted[0] = -8e-14
    weight = torch.full((100,), -1e-2, dtype=torch.float64)
    moved = weight.clone()
    moved[0] = 1e-2
    wrong, _ = compare(
        step_of(grad__a=grad * 100, weight__a=weight),
        step_of(grad__a=planted * 100, weight__a=moved),
        tolerance_of("dp=1 tp=2", precision="float64"),
    )
    assert [one.kind for one in wrong] == ["weight"]


def test_only_what_an_adam_like_rule_can_make_of_rounding_is_left_to_float64():
    """ViT under adamw and tp=2: 7e-5 in float32 at the third step, and 3e-14 in float64."""
    one, off = torch.ones(100), torch.full((100,), 1.0001)

    def run(first, second, **options):
        comparer = Comparer(tolerance_of("dp=1 tp=2", **options))
        reference = step_of(grad__a=one, weight__a=one)
        comparer.add(0, reference, first)
        comparer.add(1, reference, second)
        assert comparer.comparison.wrong
        return comparer.comparison.is_amplified

    same, grad_off = step_of(grad__a=one, weight__a=one), step_of(grad__a=off, weight__a=one)
    assert run(same, grad_off)
    assert run(same, step_of(grad__a=one, weight__a=off))
    assert not run(same, step_of(grad__a=one, weight__a=one + 1.0)), "further than the rule can go"
    assert not run(grad_off, same), "no rule has made a step yet"
    assert not run(same, step_of(weight__a=one)), "it has no gradient"
    assert not run(same, grad_off, name="sgd")
    assert run(same, step_of(grad__a=one * 1.5, weight__a=one), precision="bfloat16")
    assert not run(step_of(grad__a=one * 1.5, weight__a=one), same, precision="bfloat16")
    assert not run(same, step_of(grad__a=one.double() * math.nan, weight__a=one))


@pytest.mark.parametrize(
    ("name", "args", "steps"),
    [
        ("RMSprop", {"momentum": 0.5}, [0.1, 0.15, 0.175]),
        ("RMSprop", {"alpha": 1.0}, [0.01, 0.01, 0.01]),
        ("RMSprop", {"alpha": 0.0, "centered": True}, [0.01, 0.01, 0.01]),
        ("Rprop", {}, [0.012, 0.0144, 0.01728]),
        ("Rprop", {"step_sizes": [1e-6, 0.013]}, [0.012, 0.013, 0.013]),
    ],
)
def test_the_longest_step_is_that_of_the_rule(name, args, steps):
    """An alpha of 1 was divided by what is left of 1."""
    found = tolerance_of("dp=1 tp=2", name=f"torch.optim.{name}", args=args)
    assert found.step_sizes == pytest.approx(steps)


def test_other_weights_of_the_same_tensor_are_still_judged():
    grad = torch.ones(100)
    grad[:10] = 1e-9
    weight = torch.ones(100)
    other = weight.clone()
    other[50] = 1.01
    wrong, _ = compare(
        step_of(grad__a=grad, weight__a=weight), step_of(grad__a=grad, weight__a=other), tolerance_of("dp=1 tp=2")
    )
    assert [one.kind for one in wrong] == ["weight"]


def test_differences_come_in_the_order_in_which_a_step_goes_wrong():
    one, two = torch.ones(4), torch.full((4,), 2.0)
    reference = step_of(grad__a=one, weight__a=one, optimizer__a__m=one, buffer__b=one)
    found = step_of(loss=3.0, norm=2.0, grad__a=two, weight__a=two, optimizer__a__m=two, buffer__b=two)
    wrong, _ = compare(reference, found, tolerance_of("dp=2"))
    assert [one.kind for one in wrong] == ["loss", "grad", "norm", "optimizer", "weight", "buffer"]


def test_a_tensor_that_only_one_side_has_is_wrong():
    wrong, _ = compare(step_of(grad__a=torch.ones(1)), step_of(), tolerance_of("dp=2"))
    assert [(one.kind, one.name) for one in wrong] == [("grad", "a")]
    wrong, _ = compare(step_of(), step_of(weight__a=torch.ones(1)), tolerance_of("dp=2"))
    assert [(one.kind, one.name) for one in wrong] == [("weight", "a")]


def test_a_skipped_step_must_be_skipped_by_both():
    wrong, _ = compare(step_of(), step_of(skipped=True), tolerance_of("dp=2"))
    assert len(wrong) == 1


def test_step_counts_are_whole_numbers_and_never_close():
    wrong, _ = compare(
        step_of(optimizer__a__step=torch.tensor(3)),
        step_of(optimizer__a__step=torch.tensor(4)),
        tolerance_of("dp=1 tp=2"),
    )
    assert len(wrong) == 1


def test_the_squares_of_a_small_gradient_are_no_noise():
    """Adagrad's sum of a gradient of 1e-4 is 1e-8: below the floor of gradients, far above that of their squares."""
    whole, small = torch.ones(4), torch.full((4,), 1e-4)
    reference = step_of(grad__a=whole, grad__b=small, optimizer__b__sum=small**2)
    found = step_of(grad__a=whole, grad__b=small, optimizer__b__sum=2 * small**2)
    wrong, comparison = compare(reference, found, tolerance_of("dp=1 tp=2", name="adagrad"))
    assert [one.name for one in wrong] == ["b/sum"] and not comparison.noise


def test_a_step_that_both_skip_is_not_judged_by_its_norm():
    reference, found = (step_of(norm=norm, skipped=True) for norm in (math.nan, math.inf))
    assert compare(reference, found, tolerance_of("dp=2", "float16"))[0] == []


@pytest.mark.parametrize(("zeros", "found", "is_wrong"), [((), 0.0, True), (("b",), 0.0, False), (("b",), 0.2, True)])
def test_in_16_bits_a_true_zero_is_noise_and_no_other_gradient_is(zeros, found, is_wrong):
    """The bias before batch norm was said to differ in bfloat16: its limit was float32's."""
    limits = replace(tolerance_of("dp=2", "bfloat16", joins=True), zeros=frozenset(zeros))
    reference = step_of(grad__a=torch.ones(4), grad__b=torch.full((4,), 1e-2))
    other = step_of(grad__a=torch.ones(4), grad__b=torch.full((4,), found))
    wrong, comparison = compare(reference, other, limits)
    assert [one.name for one in wrong] == (["b"] if is_wrong else [])
    assert ("grad/b" in comparison.noise) is not is_wrong
