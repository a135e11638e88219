"""The control board: views that go to ranks, and what they answer."""

import pytest

from shoal.core.clock import Deadline
from shoal.core.errors import RunError
from shoal.launch.group.control import ControlBoard
from shoal.launch.group.elastic import NewView, view_text


@pytest.fixture
def board():
    made = ControlBoard.create(2)
    yield made
    made.close()


def test_a_view_is_read_under_its_epoch(board):
    assert board.epoch == 0
    board.publish(1, "one")
    board.publish(2, "zwei")
    assert board.read() == (2, "zwei")
    assert board.await_newer(1, Deadline(seconds=0)) and not board.await_newer(2, Deadline(seconds=0))


class _Slow:
    """The board's memory for a reader that is held up between the epoch and the text; what is given happens meanwhile."""

    def __init__(self, memory, happens):
        self._memory, self._happens = memory, happens

    def __getitem__(self, part):
        happens, self._happens = self._happens, lambda: None
        happens()
        return self._memory[part]

    def __setitem__(self, part, value):
        self._memory[part] = value

    def close(self):
        self._memory.close()


@pytest.mark.parametrize("newer", [(2,), (2, 3), (3,), (3, 5), (2, 3, 4)], ids=str)
def test_a_view_is_read_whole_whatever_is_published_meanwhile(board, newer):
    texts = {epoch: f"view {epoch} " * (6 - epoch) for epoch in range(1, 6)}

    def publish_and_begin_the_last():
        for epoch in newer[:-1]:
            board.publish(epoch, texts[epoch])
        before = board._words[0]
        board.publish(newer[-1], texts[newer[-1]])
        board._words[0] = before  # Its text is there, and its writer has not come to the epoch yet.

    board.publish(1, texts[1])
    board._memory = _Slow(board._memory, publish_and_begin_the_last)
    epoch, text = board.read()
    assert (epoch, text) == (max((1, *newer[:-1])), texts[epoch])


def test_answers_are_of_one_slot_and_are_forgotten_with_its_process(board):
    board.say_ready(1)
    board.say_arrived(1, 3)
    board.say_failed(1, 2)
    found = board.answers(1)
    assert (found.is_ready, found.arrived, found.failed) == (True, 3, 2) and not board.answers(0).is_ready
    board.clear(1)
    assert not board.answers(1).is_ready and board.answers(1).failed == 0


def test_a_board_of_another_size_and_a_view_that_does_not_fit_are_refused(board):
    with pytest.raises(RunError, match="control board for 3 ranks"):
        ControlBoard.attach(board.fd, 3)
    with pytest.raises(RunError, match="does not fit"):
        board.publish(1, "x" * 70_000)


def test_a_view_of_thousands_of_hosts_fits():
    made = ControlBoard.create(10_000)
    try:
        names = [f"rank {rank}, start 12" for rank in range(10_000)]
        replicas = [[name] for name in names]
        hosts = [f"node-{rank:05}.cluster.example.org" for rank in range(10_000)]
        view = NewView(epoch=3, replicas=replicas, num_logical=10_000, cause="they came", hosts=hosts)
        text = view_text(view, slots=range(10_000), store="")
        made.publish(3, text)
        assert made.read() == (3, text)
    finally:
        made.close()
