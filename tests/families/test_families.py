"""Models as people bring them, under plans: the table in the guide holds all of them, and some of its cells are proved here."""

import json

import pytest

from families.catalogue import EVERY, GAN, PLANS
from families.sweep import GUIDE, PAGE, RESULTS, between_markers, cell, prove, short_table, table

pytest.importorskip("transformers")
# Its modules use what torch is about to take away.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

SLICE = [
    ("DLRM", "pp=2"),  # most even cut not legal
    ("MLP-Mixer", "pp=2"),  # a transposed activation crosses stages
    ("DeBERTa", "pp=2"),  # a weight that outer code reads for several stages
    ("Gemma", "cp=2"),  # a norm that computes in float32 by itself
    ("U-Net", "dp=2 zero=3"),
    ("LSTM", "dp=2"),
    ("ResNet", "dp=2"),  # batch norm
]


@pytest.fixture
def in_tests(monkeypatch):
    """Where the functions that recipes name are imported from, in the ranks too."""
    folder = RESULTS.parents[1]
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_the_guide_has_every_model_and_no_failure():
    results = json.loads(RESULTS.read_text())
    assert list(results) == [*(family.name for family in EVERY), GAN]
    for name, cells in results.items():
        assert list(cells) == list(PLANS), name
        statuses = {row["status"] for rows in cells.values() for row in rows}
        assert statuses <= {"proven", "refused"}, (name, statuses)
        assert "proven" in statuses, name
    text = GUIDE.read_text()
    assert text == between_markers(text, table(results)), "run `python -m families.sweep --table` in tests/"


def test_the_page_of_families_is_what_was_proved():
    results, text = json.loads(RESULTS.read_text()), PAGE.read_text()
    assert text == between_markers(text, short_table(results)), "run `python -m families.sweep --table` in tests/"
    assert "**" not in text.partition("<!-- begin")[2]


def test_a_failure_in_a_cell_is_not_to_be_overlooked():
    proven = {"status": "proven", "reason": "", "dtype": "float32", "bitwise": False, "worst": 2e-7}
    crashed = {"status": "crashed", "reason": "rank 1: a bad day; go home", "dtype": "float64"}
    refused = {"status": "refused", "reason": "plan 'dp=1 tp=3': 4 heads; use tp=2", "dtype": "float64"}
    assert cell([proven, crashed]) == "**crashed**: rank 1: a bad day"
    assert (
        cell([proven, refused]) == "proven, 2e-07 in float32; float64 refused" and cell([refused]) == "refused: 4 heads"
    )


def test_documents_say_how_many_models_there_are():
    models = [family for family in EVERY if not family.name.endswith(", dict batch")]
    of_transformers = [
        family for family in models if family.build.startswith("hugging_face:") and "peft" not in family.name
    ]
    total, theirs, root = len(models) + 1, len(of_transformers), PAGE.parents[1]
    assert f"[{total} models](docs/guides/models.md), {theirs} of them" in (root / "README.md").read_text()
    chinese = (root / "README.zh.md").read_text()
    assert f"[{total} 个模型](docs/guides/models.md)" in chinese and f"其中 {theirs} 个" in chinese
    assert (
        f"All {total} models" in PAGE.read_text() and f"{total} models, " in (root / "docs/guarantees.md").read_text()
    )


@pytest.mark.timeout(300)
def test_some_cells_are_proved_again(in_tests):
    by_name = {family.name: family for family in EVERY}
    for name, plan, rows in prove([(by_name[name], plan) for name, plan in SLICE], steps=1):
        assert {row["status"] for row in rows} == {"proven"}, (name, plan, rows)


@pytest.mark.soak
@pytest.mark.parametrize("family", EVERY, ids=lambda family: family.name)
def test_every_cell_is_proved_again(in_tests, family):
    """The same status in every cell as in the guide."""
    kept = json.loads(RESULTS.read_text())[family.name]
    for _, plan, rows in prove([(family, plan) for plan in PLANS]):
        assert [row["status"] for row in rows] == [row["status"] for row in kept[plan]], (plan, rows)
