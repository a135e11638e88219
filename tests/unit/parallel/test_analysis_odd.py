"""Modules as people write them: what can be split is, what cannot is left whole with the reason, and neither by its names."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.parallel.analysis.analyse import analyse_module
from shoal.parallel.analysis.structure import ModuleAnalysis, ParallelConfig, Split, SplitKind
from shoal.parallel.zero.layout import lay_out

D, H, L, V = 16, 4, 6, 32


def find(model: nn.Module, *example: Tensor) -> ModuleAnalysis:
    return analyse_module(model, example or (torch.randn(2, L, D),), ParallelConfig())


def splits(analysis: ModuleAnalysis) -> dict[str, tuple[str, int]]:
    return {split.path: (split.kind.value, split.parts) for split in analysis.splits}


class Between(nn.Module):
    """Two linear layers and something between them."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(D if form in ("glu", "unequal") else 2 * D, D)
        self.norm, self.scale = nn.LayerNorm(2 * D), nn.Parameter(torch.ones(1))
        self.table = nn.Parameter(torch.ones(2 * D))

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if self.form == "glu":
            gate, value = h.chunk(2, dim=-1)
            return x + self.down(F.silu(gate) * value)
        if self.form == "unequal":
            small, large = h.split([D // 2, 2 * D - D // 2], dim=-1)
            return x + self.down(torch.cat((small, large[..., : D // 2]), dim=-1))
        between = {
            "norm": lambda: self.norm(h),
            "scale": lambda: h * self.scale,
            "table": lambda: h * self.table,
            "softmax": lambda: h.softmax(dim=-1),
            "mean": lambda: h - h.mean(dim=-1, keepdim=True),
            "roll": lambda: h.roll(1, dims=-1),
            "residual": lambda: h + torch.cat((x, x), dim=-1),
            "flip": lambda: h.flip(-1),
            "half": lambda: torch.cat((h[..., D:], h[..., :D]), dim=-1),
            "constants": lambda: F.gelu(h.float() * 2 + 1).clamp(min=-1).masked_fill(h > 3, 0.0),
        }
        return x + self.down(between[self.form]())


def test_features_that_stay_apart_make_a_pair():
    assert splits(find(Between("constants"))) == {"up": ("column", 1), "down": ("row", 1)}


def test_a_gate_and_its_value_from_one_layer_are_cut_each_by_itself():
    assert find(Between("glu")).splits == (
        Split(path="up", kind=SplitKind.COLUMN, parts=2),
        Split(path="down", kind=SplitKind.ROW),
    )


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("norm", "normalises over its features"),
        ("scale", "shared by all features"),
        ("table", "every rank holds whole"),
        ("softmax", "mixes its features"),
        ("mean", "mean"),
        ("roll", "roll"),
        ("residual", "every rank holds whole"),
        ("flip", "flip"),
        ("half", "by number"),
        ("unequal", "unequal parts of 8, 24"),
    ],
)
def test_features_that_meet_leave_the_layers_whole_with_the_reason(form, words):
    found = find(Between(form))
    assert found.splits == ()
    assert words in found.replicated["up"]


class Experts(nn.Module):
    """Experts of one class that all read the same input: no row of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Between("constants") for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([expert(x) for expert in self.experts]).sum(dim=0)


def test_modules_side_by_side_are_no_stack_but_their_layers_are_pairs():
    found = find(Experts())
    assert found.stacks == ()
    assert len(found.splits) == 6


class Shifting(nn.Module):
    """A block that looks at its neighbour, as RWKV does."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = Between("constants")

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x + F.pad(x, (0, 0, 1, -1)))


class Language(nn.Module):
    """Tokens in, scores out, with a choice of blocks and of ends."""

    def __init__(self, blocks: list[nn.Module], end: str = "head") -> None:
        super().__init__()
        self.end = end
        self.tokens, self.places = nn.Embedding(V, D), nn.Embedding(L, D)
        self.layer1, self.layer2 = blocks
        self.head = nn.Linear(D, V)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        x = self.layer2(self.layer1(x))
        if self.end == "places again":
            return self.head(x + self.places(torch.arange(x.shape[1])))
        if self.end == "pooled":
            return self.head(x.mean(dim=1))
        if self.end == "tied by hand":
            return F.linear(x, self.tokens.weight)
        scores = self.head(x)
        return scores.log_softmax(dim=-1) if self.end == "softmax" else scores


def ids() -> Tensor:
    return torch.randint(0, V, (2, L))


def test_numbered_siblings_are_a_row_of_blocks():
    found = find(Language([Between("glu"), Between("glu")]), ids())
    assert [(stack.blocks, stack.sequence_dim, stack.is_pointwise) for stack in found.stacks] == [
        (("layer1", "layer2"), 1, True)
    ]
    assert found.tail_is_pointwise and found.sequence == L
    assert splits(found)["tokens"] == ("vocabulary", 1) and splits(found)["head"] == ("logits", 1)
    assert "too few" in found.replicated["places"]


def test_blocks_that_look_at_their_neighbours_are_not_pointwise():
    assert not find(Language([Shifting(), Shifting()]), ids()).stacks[0].is_pointwise


def test_a_tail_that_counts_positions_itself_is_not_pointwise():
    found = find(Language([Between("glu"), Between("glu")], end="places again"), ids())
    assert not found.tail_is_pointwise and found.stacks[0].is_pointwise


def test_pooled_scores_are_not_per_position_and_still_scores():
    found = find(Language([Between("glu"), Between("glu")], end="pooled"), ids())
    assert not found.tail_is_pointwise and splits(found)["head"] == ("logits", 1)


def test_an_embedding_whose_weight_scores_the_output_by_hand_is_left_whole():
    found = find(Language([Between("glu"), Between("glu")], end="tied by hand"), ids())
    assert "tokens" not in splits(found)
    assert "something besides" in found.replicated["tokens"]


def test_scores_that_the_model_works_on_are_left_whole():
    found = find(Language([Between("glu"), Between("glu")], end="softmax"), ids())
    assert splits(found)["tokens"] == ("vocabulary", 1) and "head" not in splits(found)
    assert "not the model's output as they are" in found.replicated["head"]


def test_a_layer_of_ones_own_class_is_left_whole():
    class Adapted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    model = nn.Sequential(Adapted(D, D), nn.ReLU(), nn.Linear(D, D))
    assert find(model).splits == ()


def test_one_weight_in_two_layers_is_left_whole():
    model = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D))
    model[2].weight = model[0].weight
    found = find(model)
    assert found.splits == () and "another layer's too" in found.replicated["0"]


def test_stacked_encoders_of_torch_keep_the_row_in_each():
    layer = nn.TransformerEncoderLayer(D, H, 2 * D, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(D, D))
    assert [stack.blocks for stack in find(model).stacks] == [("0.layers.0", "0.layers.1")]


class OddBetween(nn.Module):
    """Two layers, and something between them that looks harmless and needs all features."""

    def __init__(self, act) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(D, 2 * D), nn.Linear(2 * D, D), act

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


def clear_first(h: Tensor) -> Tensor:
    h[..., 0] = 0
    return h


@pytest.mark.parametrize(
    "act",
    [
        clear_first,
        lambda h: h * h.shape[-1] ** -0.5,
        lambda h: h / math.sqrt(h.size(-1)),
        lambda h: h / h.numel(),
        lambda h: h.flip(0, 2),
        lambda h: h * torch.ones(()) * torch.full((), h.shape[-1]),
    ],
)
def test_what_counts_or_picks_features_keeps_them_whole(act):
    assert splits(find(OddBetween(act))) == {}


class TwoGates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gates, self.a, self.b = nn.Linear(D, 4 * D), nn.Linear(D, 2 * D), nn.Linear(D, 2 * D)
        self.down, self.out = nn.Linear(2 * D, D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.gates(x).chunk(2, dim=-1)
        return x + self.down(self.a(x) * first) + self.out(self.b(x) * second)


def test_parts_of_a_layer_are_not_taken_for_its_whole():
    """Cut as one part, the second rank's ``first`` would be the second gate."""
    assert "gates" not in splits(find(TwoGates()))


class SharedDown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.down = nn.Linear(D, 2 * D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.one(x))) + self.down(F.gelu(self.two(x)))


def test_two_layers_that_one_sums_up_are_split_together():
    assert splits(find(SharedDown())) == {"one": ("column", 1), "two": ("column", 1), "down": ("row", 1)}


class Masked(nn.Module):
    """Scores of which one is overwritten, in the tensor that the model puts out."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(V, D), nn.Linear(D, V)

    def forward(self, ids: Tensor) -> Tensor:
        scores = self.head(self.tokens(ids))
        scores[..., 0] = -1e9
        return scores


def test_scores_that_are_overwritten_are_not_split():
    assert "head" not in splits(find(Masked(), torch.randint(V, (2, L))))


class Conditioned(nn.Module):
    """A block in which every position also reads one that is always the same."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x + x[:, self.place].unsqueeze(1))))


@pytest.mark.parametrize("place", [0, 1, -1])
def test_a_position_that_all_others_read_is_seen(place):
    (stack,) = find(nn.Sequential(Conditioned(place), Conditioned(place))).stacks
    assert stack.sequence_dim == 1 and not stack.is_pointwise


class Placed(nn.Module):
    """A block that adds positions of its own, counted from 0."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(L, D))
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x + self.places[: x.shape[1]])))


def test_blocks_that_count_positions_themselves_are_seen():
    """Under sp each rank would take the first rows of the table."""
    (stack,) = find(nn.Sequential(Placed(), Placed())).stacks
    assert stack.sequence_dim == 1 and not stack.is_pointwise


class WithExtra(Masked):
    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.head(self.tokens(ids))
        return scores, torch.zeros(())


def test_scores_in_a_tuple_are_left_to_the_users_own_loss():
    assert "head" not in splits(find(WithExtra(), torch.randint(V, (2, L))))


class ReadByItsParent(nn.Module):
    """Ties the output layer to the embedding by hand, as many scripts do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(2))
        self.head = nn.Linear(16, 32)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return F.linear(x, self.embedding.weight) + self.head(x)


def test_a_weight_that_its_parent_reads_is_known_and_stays_in_the_root_of_zero():
    model = ReadByItsParent()
    analysis = analyse_module(model, (torch.randint(32, (2, 8)),), ParallelConfig())
    assert analysis.read_outside == {"embedding.weight"}
    units = {unit.path: [slot.name for slot in unit.slots] for unit in lay_out(model, analysis, 2).units}
    assert units[""] == ["embedding.weight"] and "embedding" not in units and "head" in units
