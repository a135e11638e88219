"""``source = "table"``: what becomes a tensor, what is refused, and that held-out rows are prepared as training rows were."""

import numpy as np
import pytest
import torch
from torch import nn

from shoal.core.config import validate
from shoal.core.errors import RequestError
from shoal.data.batchform import call_model
from shoal.data.build import build_splits
from shoal.data.check import check_data
from shoal.data.config import TableConfig
from shoal.data.fingerprint import Fingerprint, list_differences, take_fingerprint
from shoal.data.fitted import keep_fitted, with_fitted
from shoal.data.prepare import prepare_rows
from shoal.data.spec import IGNORED
from shoal.data.tiers.config import CacheConfig
from support.data.webserver import Web, serving

ROWS = 120


@pytest.fixture
def path(tmp_path):
    draws = np.random.default_rng(0)
    lines = ["a,b,n,word,label,amount,hole"]
    for row in range(ROWS):
        label = ["x", "y", "z"][row % 3]
        hole = "" if row % 7 == 0 else f"{row / 10}"
        lines.append(f"{draws.normal():.3f},{draws.normal() + 5:.3f},{row % 9},w{row % 4},{label},{row * 0.5},{hole}")
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def config_of(path, **settings):
    given = {"source": "table", "path": str(path), "validation": 0.1, "test": 0.1} | settings
    return validate(TableConfig, given, origin="a.toml")


def test_columns_become_one_input_and_labels_are_classes(path):
    config = config_of(path, inputs=["a", "b", "n"], target="label")
    splits = build_splits(config, seed=0)
    summary = check_data(config)
    assert (
        (summary.train, summary.validation, summary.test)
        == (96, 12, 12)
        == tuple(len(part) for part in (splits.train, splits.validation, splits.test))
    )
    assert splits.spec.kind == "classes" and splits.spec.features == (3,) and splits.spec.classes == 3
    items = splits.train.collate([0, 5, 7])
    assert items.inputs[0].dtype == torch.float32 and items.inputs[0].shape == (3, 3) and items.weight == 3
    assert items.targets.dtype == torch.int64 and "proven: every row once" in summary.description


def test_a_table_without_held_out_rows_and_ids_that_float32_would_join(path, tmp_path):
    rows = prepare_rows(config_of(path, inputs=["a", "n"], target="label", validation=0, test=0))
    assert [len(part) for part in rows.splits.values()] == [ROWS, 0, 0] and rows.splits["test"].inputs[""].shape == (
        0,
        2,
    )
    big = tmp_path / "big.csv"
    big.write_text("user,x,y\n" + "".join(f"{(1 << 24) + row},{row / 2},{row % 2}\n" for row in range(40)))
    assert prepare_rows(config_of(big, inputs=["user"], target="y")).splits["train"].inputs[""].dtype == np.int64
    with pytest.raises(RequestError, match=r"column 'user' has 167772\d\d, .* float32, which is exact up to 16777216"):
        prepare_rows(config_of(big, inputs=["user", "x"], target="y"))


def test_named_inputs_are_keywords_of_the_model(path):
    steps = [{"step": "vocabulary", "columns": ["word"]}]
    config = config_of(path, inputs={"x": ["a", "b"], "ids": ["word"]}, target=["amount", "a"], prepare=steps)
    splits = build_splits(config, seed=0)
    items = splits.train.collate(np.arange(4))

    class Model(nn.Module):
        def forward(self, ids, x):
            assert ids.dtype == torch.int64 and x.dtype == torch.float32
            return ids + x.sum(dim=1, keepdim=True)

    assert call_model(Model(), items.model_inputs).shape == (4, 1)
    assert items.targets.shape == (4, 2) and items.targets.dtype == torch.float32 and splits.spec.kind == "own"


def test_held_out_rows_are_scaled_by_what_the_training_rows_taught(path):
    steps = [{"step": "fill", "columns": ["hole"], "how": "median"}, {"step": "scale", "columns": ["a", "hole"]}]
    raw = prepare_rows(config_of(path, inputs=["a"], target="label"))
    found = prepare_rows(config_of(path, inputs=["a", "hole"], target="label", prepare=steps))
    train = raw.splits["train"].inputs[""].astype(np.float64)
    for name in ("train", "validation", "test"):
        wanted = (raw.splits[name].inputs[""] - train.mean()) / train.std()
        assert found.splits[name].inputs[""][:, :1] == pytest.approx(wanted, abs=1e-5)
    assert found.fitted.rows_digest == found.certificate.sides[0].digest


def test_unknown_labels(path):
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines, "0,0,0,w0,never,0,1"]) + "\n")
    settings = {"inputs": ["a"], "target": "label", "cut": {"by": "time", "key": "amount", "backwards": "sort"}}
    path.write_text(path.read_text().replace("w0,never,0,", "w0,never,999,"))
    with pytest.raises(
        RequestError, match=r"test split of .* has 1 rows with labels of 'label' that no training row has, 'never'"
    ):
        prepare_rows(config_of(path, **settings))
    counted = build_splits(config_of(path, **settings, labels={"unknown": "count"}), seed=0)
    last = counted.test.collate(range(len(counted.test)))
    assert (last.targets == IGNORED).sum() == 1 and last.weight == len(counted.test) - 1 and counted.spec.classes == 3
    appended = prepare_rows(config_of(path, **settings, labels={"unknown": "append"}))
    assert appended.space.names == ("x", "y", "z", "never")
    with pytest.raises(RequestError, match="column 'label' has more than 3 labels"):
        prepare_rows(config_of(path, **settings, labels={"unknown": "append", "most": 3}))


def test_ranks_with_other_labels_or_other_steps_are_told_apart(path, tmp_path):
    settings = {"inputs": ["a"], "target": "label"}
    other = tmp_path / "other.csv"
    other.write_text(path.read_text().replace(",z,", ",zz,"))

    def differ(one, two):
        prints = [take_fingerprint(build_splits(config, seed=0)) for config in (one, two)]
        return list_differences(*prints, here="here", there="there")

    assert differ(config_of(path, **settings), config_of(path, **settings)) == []
    told = differ(config_of(path, **settings), config_of(other, **settings))[0]
    assert "the train split has the vocabulary of labels 'label' (3 labels from 'x' to 'z', digest " in told
    assert " here, and 'label' (3 labels from 'x' to 'zz', digest " in told
    # Checkpoints from before the vocabulary was told go on.
    own = take_fingerprint(build_splits(config_of(path, **settings), seed=0))
    values = own.as_values()
    assert Fingerprint.from_values(values) == own
    for split in values.values():
        del split["labels"]
    assert list_differences(own, Fingerprint.from_values(values), here="here", there="there") == []
    scaled = settings | {"prepare": [{"step": "scale", "columns": ["a"]}]}
    assert differ(config_of(path, **settings), config_of(path, **scaled))


def test_a_run_keeps_what_was_fitted_and_wants_it_back(path, tmp_path):
    config = config_of(path, inputs=["a"], target="label", prepare=[{"step": "scale", "columns": ["a"]}])
    kept = keep_fitted(config, tmp_path / "run")
    assert kept.fitted == str(tmp_path / "run" / "data") and len(kept.fitted_digest) == 32
    assert keep_fitted(config, tmp_path / "run") == kept == keep_fitted(kept, tmp_path / "elsewhere")
    (tmp_path / "run").rename(tmp_path / "moved")
    assert with_fitted(kept, tmp_path / "moved").fitted == str(tmp_path / "moved" / "data")
    before = prepare_rows(config).splits["test"].inputs[""]
    assert (prepare_rows(with_fitted(kept, tmp_path / "moved")).splits["test"].inputs[""] == before).all()
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], *("7.5," + line.split(",", 1)[1] for line in lines[1:])]) + "\n")
    with pytest.raises(RequestError, match="the training rows are others than they were"):
        prepare_rows(kept.model_copy(update={"fitted": None}))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"inputs": ["hole"]}, r"'hole' has \d+ missing values in the train split; write a step \"fill\""),
        ({"inputs": ["word"]}, "column 'word' is text, and the model takes numbers"),
        ({"inputs": ["aa"]}, "there is no column 'aa'"),
        ({"inputs": ["a"], "target": "lable"}, "there is no column 'lable'.*did you mean 'label'"),
        ({"inputs": ["a"], "target": None}, "data.target is missing"),
        ({"inputs": ["a"], "cut": {"by": "user", "key": "usr"}}, "there is no column 'usr'"),
        (
            {"inputs": ["a"], "cut": {"by": "user", "key": "label"}, "validation": 0.2, "test": 0.2},
            "labels of 'label' that no",
        ),
        ({"path": "nowhere.csv"}, "there is no such file"),
        ({"inputs": ["a"], "types": {"label": "float"}}, "row 1, column 'label': 'x' is no number"),
    ],
    ids=str,
)
def test_what_cannot_be_trained_on(path, settings, said, monkeypatch):
    monkeypatch.chdir(path.parent)
    with pytest.raises(RequestError, match=said):
        prepare_rows(config_of(**({"path": path, "target": "label"} | settings)))


def test_every_byte_of_files_on_a_web_server_is_served_once_to_all_ranks_of_a_host(path, tmp_path):
    web = Web()
    web.files = {"rows.csv": path.read_bytes()}
    web.fail("500", "whole", "half", "slow")
    size = len(web.files["rows.csv"])
    # Every rank, and the command before them, reads the head of every file and then all rows.
    near = {"disk": "1 MiB", "path": str(tmp_path / "near"), "policy": "lru", "block": "1 KiB"}
    with serving(web):
        plain = config_of(f"{web.address}/rows.csv", inputs=["a", "b"], target="label")
        here, cached = prepare_rows(config_of(path, inputs=["a", "b"], target="label")), []
        for _ in range(3):
            found = prepare_rows(plain.model_copy(update={"cache": CacheConfig.model_validate(near)}))
            assert (found.splits["train"].inputs[""] == here.splits["train"].inputs[""]).all()
            cached.append(found.cached)
        ranges = [one for one in web.ranges if one is not None]
        num_faults = 2
        assert len(ranges) == -(-size // 1024) + num_faults and cached[0].fetched_bytes == size
        assert [report.fetches for report in cached[1:]] == [0, 0] and cached[1].disk_bytes > 0
        web.files["rows.csv"], web.versions["rows.csv"] = path.read_bytes().replace(b",x,", b",w,"), "2"
        train = build_splits(plain.model_copy(update={"cache": CacheConfig.model_validate(near)}), seed=0).train
        report = train.cache_report()
        assert report.fetched_bytes == size and "'w'" in train.vocabulary, "another version is fetched"
        assert train.cache_report() is None, "nothing is read after that"
    with pytest.raises(RequestError, match=r"needs data\.cache\.path"):
        prepare_rows(config_of(path, target="label", cache={"disk": "1 MiB"}))


def test_token_files(tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(1000, dtype=np.uint16) % 50)
    splits = build_splits(config_of(tmp_path / "ids.npy", sequence=9), seed=0)
    items = splits.train.collate([3])
    assert splits.spec.kind == "tokens" and splits.spec.vocab == 50 and items.weight == 9
    assert items.targets[0, :-1].tolist() == items.inputs[0][0, 1:].tolist()
