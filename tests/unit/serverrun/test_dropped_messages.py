"""What the wire drops is seen: in the events of the process that dropped it, in the summary, and at the end of the run."""

import asyncio
import json
from dataclasses import replace

import zmq

from shoal.comm.wire.node import Node, new_instance_id
from shoal.core.events import MessagesDropped
from shoal.core.plan import Plan
from shoal.core.rundir import RunDir
from shoal.paramserver.messages import OPERATIONS, Ask, Told
from shoal.serverrun.notices import DroppedMessages, count_dropped
from shoal.serverrun.process import ProcessSpec, open_node
from shoal.telemetry.eventlog import append_event, decode_events
from shoal.trainer.summary import describe_summary


def place_in(folder, **changes):
    place = ProcessSpec(
        name="server-0",
        rank=0,
        num_ranks=1,
        instance_id=new_instance_id(),
        folder=folder,
        run_dir=folder / "run",
        resume=False,
        recipe=None,
        plan=Plan.parse("ps=1 workers=1"),
    )
    return replace(place, **changes)


def disturb(place):
    """Open a member's node, send it nonsense and one real question, and close it."""

    async def run():
        node, other = open_node(place), Node(instance_id=new_instance_id(), operations=OPERATIONS)

        async def answer(request):
            await request.answer(Told(view=None, versions=()))

        address = await node.listen(place.address, answer)
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        try:
            socket.connect(address)
            for _ in range(3):
                socket.send_multipart([b"no header", b"no body", b"no seal"])
            await other.connect(address).call(Ask(), deadline=20.0)
            async with asyncio.timeout(20):
                while node.counters.dropped < 3:
                    await asyncio.sleep(0.01)
        finally:
            socket.close(linger=0)
            context.term()
            await other.close()
            await node.close()

    asyncio.run(run())


def test_what_was_dropped_is_in_the_events_and_counted(tmp_path):
    """The counts were kept and read by nobody."""
    tmp_path.chmod(0o700)
    place = place_in(tmp_path)
    disturb(place)
    path = RunDir(place.run_dir).events(0)
    [event] = list(decode_events(path.read_bytes().splitlines()))
    assert (event["kind"], event["process"]) == ("messages_dropped", "server-0")
    assert sum(event["counts"].values()) == 3 and not {"late", "received", "accepted"} & event["counts"].keys()
    assert count_dropped(place.run_dir) == event["counts"]


def test_who_has_not_heard_of_an_epoch_yet_is_no_fault(tmp_path, capsys):
    """A run that nobody disturbed ended with "dropped 1 message: 1 stale": workers join one after the other, each a new epoch."""
    node = Node(instance_id=new_instance_id(), operations=OPERATIONS)
    tallies = [DroppedMessages(node, name="server-0", run_dir=folder, rank=0) for folder in (tmp_path, None)]
    node.counters.add("behind")
    for dropped_messages in tallies:
        dropped_messages.write()
    assert not RunDir(tmp_path).events(0).exists() and not capsys.readouterr().err
    node.counters.add("stale")
    tallies[0].write()
    assert count_dropped(tmp_path) == {"stale": 1}


def test_a_process_that_leaves_no_files_says_it_at_its_end(tmp_path, capsys):
    tmp_path.chmod(0o700)
    disturb(place_in(tmp_path, run_dir=None))
    assert "messages that were dropped: 3 " in capsys.readouterr().err


def test_the_last_word_of_every_process_is_added(tmp_path):
    def write(rank, instance_id, **counts):
        event = MessagesDropped(process=f"server-{rank}", instance_id=instance_id, counts=counts)
        assert append_event(RunDir(tmp_path).events(rank), event, rank=rank)

    write(0, "a", malformed=1)
    write(0, "a", malformed=2, duplicate=1)
    write(1, "b", stale=4)
    write(1, "c", malformed=5)
    assert count_dropped(tmp_path) == {"duplicate": 1, "malformed": 7, "stale": 4}


def test_what_the_releases_before_wrote_counts_in_a_run_that_is_resumed(tmp_path):
    path = RunDir(tmp_path).events(0)
    path.parent.mkdir(parents=True)
    event = {"t": 1.0, "rank": 0, "kind": "messages_dropped", "process": "server-0"}
    told = [
        {**event, "incarnation": name, "counts": {"stale": count}} for name, count in (("a", 1), ("a", 3), ("b", 2))
    ]
    path.write_text("".join(f"{json.dumps(one)}\n" for one in told))
    assert count_dropped(tmp_path) == {"stale": 5}


def test_the_end_of_a_run_names_them_only_where_there_were_some(tmp_path):
    summary = dict.fromkeys(("stopped_by", "final_loss", "first_loss", "validation_loss", "baseline_loss"))
    summary |= {"status": "completed", "steps": 3, "wall_s": 1.0, "tokens_per_s": 1.0, "plan": "ps=1 workers=1"}
    summary |= {"peak_rss_bytes": [1], "weights_sha256": "0" * 64, "messages_dropped": {}}
    assert "dropped" not in describe_summary(summary, tmp_path)
    summary["messages_dropped"] = {"duplicate": 1, "stale": 4}
    assert "dropped          5 messages: 1 duplicate, 4 stale" in describe_summary(summary, tmp_path)
