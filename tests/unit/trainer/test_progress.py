"""How far a run is, as checkpoints keep it."""

import pytest

from shoal.core.errors import RunError
from shoal.data.order import Position
from shoal.trainer.progress import Progress


def test_progress_comes_back_from_its_values():
    progress = Progress(step=3, position=Position(epoch=1, offset=8), async_signature="pipedream pp=2", async_start=2)
    assert Progress.from_values(progress.as_values(), origin="here") == progress


def test_fields_of_checkpoints_that_were_written_under_former_names_are_read():
    progress = Progress(step=3, position=Position(), async_signature="pipedream pp=2", async_start=2)
    values = progress.as_values()
    values["stream"], values["stream_start"] = values.pop("async_signature"), values.pop("async_start")
    assert Progress.from_values(values, origin="here") == progress


def test_a_field_that_nobody_knows_is_refused():
    with pytest.raises(RunError, match="here does not say how far it was"):
        Progress.from_values({**Progress(position=Position()).as_values(), "flow": 1}, origin="here")


def test_a_place_in_a_stream_that_is_no_text_is_refused():
    values = Progress(position=Position()).as_values()
    with pytest.raises(RunError, match=r"position\.stream is"):
        Progress.from_values({**values, "position": {"epoch": 0, "offset": 0, "stream": {"a": 1}}}, origin="here")
