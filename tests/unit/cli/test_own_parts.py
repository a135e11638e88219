"""What the command line hands to a request is all that a request may ask for."""

import inspect

from shoal.cli import train
from shoal.trainer.own_parts import OwnPartsHere
from shoal.trainer.request import OwnParts


def test_every_question_of_a_request_reaches_the_process_that_can_answer():
    asked = {name for name, one in inspect.getmembers(OwnParts, inspect.isfunction) if not name.startswith("_")}
    for answering in (train.OwnParts, OwnPartsHere):
        assert asked <= set(dir(answering)), answering
