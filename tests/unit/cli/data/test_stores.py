"""``shoal data build``, ``show``, ``verify`` and ``bench``: what they print, what they write for programs, their exit codes."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from shoal.cli.data.group import app
from shoal.core.config import validate
from shoal.core.errors import RequestError, RunError
from shoal.data.config import StoreConfig
from shoal.data.sources.storefile import open_store_data
from shoal.data.store.reader import open_store


def run(*arguments):
    """Exit code, stdout, and the error that the command line would print."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        assert isinstance(result.exception, RequestError | RunError), result.exception
        return result.exception.exit_code, result.stdout, str(result.exception)
    return result.exit_code, result.stdout, ""


@pytest.fixture
def store(tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(20_000, dtype=np.uint16) % 300)
    code, out, _ = run(
        "build", tmp_path / "ids.npy", tmp_path / "store", "--block-bytes", 16384, "--json", tmp_path / "b.json"
    )
    assert code == 0 and "version 1, 20000 rows in 3 blocks" in out
    assert json.loads((tmp_path / "b.json").read_text())["rows"] == 20_000
    return tmp_path / "store"


def test_show_and_verify_a_store(store, tmp_path):
    code, out, _ = run("show", store, "--json", tmp_path / "s.json")
    assert code == 0 and "20000 rows in 3 blocks" in out and "tokens <u2" in out
    said = json.loads((tmp_path / "s.json").read_text())
    assert said["columns"]["tokens"]["max"] == 299 and said["columns"]["tokens"]["min"] == 0 and said["versions"] == [1]
    assert run("verify", store)[:2] == (0, f"{store}: whole\n")
    path = next((store / "blocks").iterdir())
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    code, out, _ = run("verify", store, "--json", tmp_path / "v.json")
    assert code == 1 and "not whole" in out and path.name in out
    said = json.loads((tmp_path / "v.json").read_text())
    assert not said["whole"] and path.name in said["problems"][0]["file"]


def test_rows_are_shown_by_their_key(tmp_path):
    (tmp_path / "rows.csv").write_text("user,x,name\n11,1.5,ann\n12,,bob\n11,2.5,eve\n")
    assert run("build", tmp_path / "rows.csv", tmp_path / "people", "--key", "user")[0] == 0
    code, out, _ = run("show", tmp_path / "people", "--key", 11, "--json", tmp_path / "k.json")
    rows = [{"row": 0, "user": 11, "x": 1.5, "name": "ann"}, {"row": 2, "user": 11, "x": 2.5, "name": "eve"}]
    assert code == 0 and [json.loads(line) for line in out.splitlines()] == rows
    assert json.loads((tmp_path / "k.json").read_text())["found"] == rows
    assert json.loads(run("show", tmp_path / "people", "--key", "12")[1])["x"] is None
    for key, said in (("13", "no row of version 1"), ("ann", "whole numbers")):
        code, _, error = run("show", tmp_path / "people", "--key", key)
        assert code == 2 and said in error
    assert run("build", tmp_path / "rows.csv", tmp_path / "named", "--key", "name")[0] == 0
    assert json.loads(run("show", tmp_path / "named", "--key", "eve")[1])["row"] == 2


def test_append_and_clean_up(store, tmp_path):
    code, out, _ = run("build", tmp_path / "ids.npy", store, "--append")
    assert code == 0 and "version 2, 40000 rows" in out
    (store / "blocks" / f"{'0' * 32}.block").write_bytes(b"left over")
    code, out, _ = run("show", store, "--unreferenced", 0)
    assert code == 0 and "1 files that no version names" in out
    assert run("verify", store, "--delete-unreferenced", 24)[1].endswith("deleted 0 files that no version names\n")
    assert run("verify", store, "--delete-unreferenced", 0)[1].endswith("deleted 1 files that no version names\n")
    assert run("verify", store)[0] == 0


def test_files_of_rows_with_a_key(tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    for number in range(3):
        lines = [f"{10 * number + row},{row / 2},name {row}" for row in range(10)]
        (folder / f"{number}.csv").write_text("\n".join(["id,x,name", *lines]) + "\n")
    target = tmp_path / "store"
    code, out, _ = run("build", folder, target, "--key", "id", "--codec", "zstd", "--workers", 2)
    assert code == 0 and "30 rows" in out
    reader = open_store(str(target))
    assert reader.find([25, 3, 99]).tolist() == [25, 3, -1]
    assert reader.read(np.array([25]))["name"].value(0) == "name 5"


def test_bench_compares_with_a_memory_map(store, tmp_path):
    code, out, _ = run("bench", store, "--rows", 2000, "--rounds", 1, "--json", tmp_path / "m.json")
    assert code == 0 and "at random" in out
    orders = json.loads((tmp_path / "m.json").read_text())["orders"]
    assert [one["order"] for one in orders] == ["in order", "at random"] and all(one["store_us"] > 0 for one in orders)


def test_bench_says_how_orders_mix(store, tmp_path):
    code, out, _ = run(
        "bench", store, "--order", "--batch", 50, "--window", 2, "--rows", 10_000, "--json", tmp_path / "o.json"
    )
    assert code == 0 and "fetches a block" in out and "a window of 3 would do" in out
    said = json.loads((tmp_path / "o.json").read_text())
    full, window, time = (said["orders"][name] for name in ("full", "window", "time"))
    assert full["chi2"] < 1.1 < window["chi2"] < time["chi2"] and time["lag1"] > 0.9
    assert said["blocks"] == 3 and full["fetches_per_block"] > 50 and window["fetches_per_block"] == 1


def test_bench_replays_caches(tmp_path):
    code, out, _ = run(
        "bench", "--caches", "--policy", "mru", "--share", 0.5, "--keys", 100, "--json", tmp_path / "c.json"
    )
    assert code == 0 and "holds 50% of the keys" in out
    said = json.loads((tmp_path / "c.json").read_text())
    assert said["share"] == 0.5 and sorted(said["policies"]) == ["belady", "mru"]
    # Of 11 scans of 100 keys MRU hits the half that stays, within the one place that changes, and nothing hits more.
    scan = {name: found["scan"] for name, found in said["policies"].items()}
    assert scan["mru"]["accesses"] == 1100 and 500 < scan["mru"]["hits"] <= scan["belady"]["hits"] <= 550


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("show", "nowhere"), "is no store of data"),
        (("verify", "nowhere"), "is no store of data"),
        (("build", "nowhere.npy", "dst"), "no such file"),
        (("build", "ids.npy", "store"), "holds a store already"),
        (("build", "ids.npy", "dst", "--codec", "gzip"), "no codec 'gzip'"),
        (("build", "ids.npy", "dst", "--key", "user"), "no column 'user'"),
        (("build", "ids.npy", "store", "--append", "--key", "tokens"), "--key is chosen where the store is built"),
        (("show", "store", "--version", "4"), "no version 4"),
        (("show", "store", "--key", "4"), "was built without a key"),
        (("bench",), "name a store to measure"),
        (("bench", "store", "--caches"), "leave out STORE"),
        (("bench", "--caches", "--policy", "oldest"), "oldest"),
        (("bench", "--caches", "--share", "2"), "give a share between 0 and 1"),
        (("bench", "store", "--policy", "lru"), "--policy is of --caches"),
        (("bench", "store", "--window", "4"), "--window is of --order"),
        (("bench", "store", "--order", "--batch", "30000"), "the store has 20000 rows, and a batch 30000"),
    ],
    ids=str,
)
def test_wrong_requests(store, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    code, _, error = run(*arguments)
    assert code == 2 and words in error


@pytest.fixture
def visits(tmp_path):
    lines = [f"{row},{row % 7},2026-01-{1 + row // 10:02},{row / 4}" for row in range(200)]
    (tmp_path / "visits.csv").write_text("\n".join(["id,user,when,x", *lines]) + "\n")
    assert run("build", tmp_path / "visits.csv", tmp_path / "visits")[0] == 0
    return tmp_path / "visits"


def test_a_split_is_kept_in_its_store_and_a_recipe_finds_it(visits):
    code, out, _ = run("split", visits, "--by", "time", "--key", "when", "--save", "late", "--test", 0.1)
    assert code == 0 and "proven: every row once" in out and "kept as split late of version 1" in out
    config = validate(
        StoreConfig,
        {"source": "store", "path": str(visits), "split": "late", "target": "x", "inputs": ["id"]},
        origin="a test",
    )
    train, _, test = (part.rows(np.arange(len(part))) for part in open_store_data(config).parts)
    when = open_store(str(visits)).read(np.arange(200))["when"].values
    assert when[train].max() < when[test].min() and len(test)
    code, _, error = run("split", visits, "--by", "user", "--key", "user", "--save", "late")
    assert code == 2 and "has a split 'late' already" in error
    code, _, error = run("split", f"{visits}.csv", "--save", "late")
    assert code == 2 and "build one of it first" in error


def test_stats_of_a_store_are_those_of_its_files(visits, tmp_path):
    for source in (visits, f"{visits}.csv"):
        assert run("stats", source, "--json", tmp_path / f"{'store' if source == visits else 'file'}.json")[0] == 0
    said = [json.loads((tmp_path / f"{name}.json").read_text()) for name in ("store", "file")]
    assert said[0]["format"] == "store" and said[0]["columns"] == said[1]["columns"]


def test_columns_and_types_are_chosen_where_a_store_is_built(tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / "a.csv").write_text("id,x,old\n1,2,3\n")
    (folder / "b.csv").write_text("id,x,new\n2,5,3\n")
    code, _, error = run("build", folder, tmp_path / "all")
    assert code == 2 and "the schema changed between shards" in error and "--columns A,B" in error
    code, _, error = run("build", folder, tmp_path / "two", "--columns", "x,id", "--type", "x=float")
    assert code == 0, error
    table = open_store(str(tmp_path / "two")).read(np.arange(2))
    assert (
        table.schema.names == ("x", "id")
        and table["x"].values.tolist() == [2.0, 5.0]
        and table["x"].field.kind == "<f8"
    )
    code, _, error = run("build", folder, tmp_path / "three", "--type", "x")
    assert code == 2 and "--type x is no COLUMN=TYPE" in error


def test_an_append_takes_the_types_of_the_store(tmp_path):
    """A file whose numbers happen to be whole, or whose texts are all missing, is no other schema."""
    first, second, other = tmp_path / "1.csv", tmp_path / "2.csv", tmp_path / "3.csv"
    first.write_text("x,s\n1.5,a\n2.5,7\n")
    second.write_text("s,x,extra\n,1,0\n3,2,0\n")
    other.write_text("x,s\nmuch,a\n")
    assert run("build", first, tmp_path / "store", "--workers", 1)[0] == 0
    code, _, error = run("build", second, tmp_path / "store", "--append")
    assert code == 2 and "column 'extra' is in" in error and "not in the store" in error
    code, out, _ = run("build", second, tmp_path / "store", "--append", "--columns", "x,s")
    assert code == 0 and "version 2, 4 rows" in out
    (tmp_path / "4.jsonl").write_text('{"x": 3}\n')
    assert run("build", tmp_path / "4.jsonl", tmp_path / "store", "--append")[0] == 0
    found = open_store(str(tmp_path / "store")).read(np.arange(5))
    assert found["x"].values.tolist() == [1.5, 2.5, 1.0, 2.0, 3.0]
    assert [found["s"].value(row) for row in range(5)] == ["a", "7", None, "3", None]
    code, _, error = run("build", other, tmp_path / "store", "--append")
    assert code == 2 and "row 1, column 'x'" in error
