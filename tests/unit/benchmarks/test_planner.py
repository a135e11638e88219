"""The planner's benchmark runs without its table, which is not part of the repository: ``make bench`` gives no arguments."""

import importlib.util
import sys
from pathlib import Path

MAIN = Path(__file__).resolve().parents[3] / "benchmarks" / "planner" / "main.py"


def load():
    spec = importlib.util.spec_from_file_location("planner_benchmark", MAIN)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_without_a_table_the_search_is_measured_and_the_rest_is_said_to_be_skipped(tmp_path, monkeypatch, capsys):
    """The table was a required argument, and the benchmarks after this one were never reached."""
    module = load()
    monkeypatch.setattr(module, "TABLE", tmp_path / "missing.csv")
    monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(module, "time_search", lambda cluster, batch: print(f"searched {cluster}"))
    monkeypatch.setattr(sys, "argv", ["main.py"])
    module.main()
    said = capsys.readouterr().out
    assert said.count("searched") == 2 and "skipped the predictions" in said and not (tmp_path / "results").exists()
