"""The exit code of ``shoal verify``: 1 the answer is no, 2 what was asked cannot be proved, 0 it is proved."""

import json

import pytest
import typer

from shoal.cli.verify import _judge, _Kept
from shoal.core.errors import EXIT_NO, EXIT_WRONG_REQUEST, RequestError
from shoal.verify.certificate import Certificate, MutantResult
from shoal.verify.result import Off, PlanResult, Prediction

HELD = Prediction(is_made=True)
OFF = Prediction(is_made=True, off=(Off(what="bytes of activations", predicted=100, counted=108, where="rank 0"),))


def certificate(*statuses, prediction=HELD, **changes):
    plans = [
        PlanResult(
            plan=f"dp={number}", dtype="float32", steps=3, status=status, reason="because", prediction=prediction
        )
        for number, status in enumerate(statuses, start=1)
    ]
    return Certificate(plans=tuple(plans), **changes)


def exit_of(found, *, strict=False):
    try:
        _judge(found, strict=strict)
    except typer.Exit as exit:
        return exit.exit_code
    except RequestError as error:
        assert "because" in str(error)
        return error.exit_code
    return 0


@pytest.mark.parametrize(
    ("statuses", "named", "of_all"),
    [
        (["proven", "proven"], 0, 0),
        (["proven", "differs"], EXIT_NO, EXIT_NO),
        (["proven", "crashed"], EXIT_NO, EXIT_NO),
        (["proven", "refused"], EXIT_WRONG_REQUEST, 0),
        (["refused"], EXIT_WRONG_REQUEST, EXIT_WRONG_REQUEST),
        (["proven", "refused", "differs"], EXIT_NO, EXIT_NO),
    ],
)
def test_what_was_named_must_be_proved_and_of_all_nothing_may_differ(statuses, named, of_all):
    assert exit_of(certificate(*statuses)) == named
    assert exit_of(certificate(*statuses, takes_all=True)) == of_all


def test_a_prediction_decides_where_it_is_asked_to():
    found = certificate("proven", prediction=OFF)
    assert exit_of(found) == 0 and exit_of(found, strict=True) == EXIT_NO
    assert exit_of(certificate("proven"), strict=True) == 0
    assert exit_of(certificate("proven", prediction=Prediction()), strict=True) == 0


def test_a_mutant_that_was_not_caught():
    values = {"name": "a", "plan": "dp=2", "dtype": "float32", "by": None, "expected": "grad", "control_ok": True}
    assert exit_of(Certificate(mutants=(MutantResult(**values, caught=False),))) == EXIT_NO
    assert exit_of(Certificate(mutants=(MutantResult(**values, caught=True),))) == 0


def test_files_are_there_from_the_first_proof_on(tmp_path):
    path, page, link = tmp_path / "a.json", tmp_path / "a.md", tmp_path / "link.json"
    (tmp_path / "elsewhere.json").write_text("before")
    link.symlink_to(tmp_path / "elsewhere.json")
    kept, once = _Kept(path, page), _Kept(link, None)
    for each in (kept, once):
        each.save(certificate("proven", pending=("dp=2 in float32",)))
    assert json.loads(path.read_text())["pending"] == ["dp=2 in float32"] and "not finished" in page.read_text()
    # What a rename must not replace gets the last one alone.
    assert link.read_text() == "before"
    for each in (kept, once):
        each.save(certificate("proven", "proven"))
    assert [len(json.loads(file.read_text())["plans"]) for file in (path, link)] == [2, 2]
    assert page.read_text().startswith("# Shoal certificate: proved")


def test_a_reason_that_plans_share_is_said_once(capsys):
    """Three plans of a model with ``nn.LSTM(dropout=...)`` were refused with the same paragraph seven times."""
    for found, times in ((certificate("refused", "refused"), 0), (certificate("proven", "refused", "refused"), 1)):
        kept = _Kept(None, None)
        kept.save(found)
        kept.show()
        assert capsys.readouterr().out.count("because") == times
        assert exit_of(found) == EXIT_WRONG_REQUEST, "the error says it too"
