"""A topic of Kafka, on librdkafka's own brokers in this process: every message is one row, once."""

import json

import numpy as np
import pytest

from shoal.core.errors import RequestError, RunError
from shoal.data.formats.options import ReadOptions, Rejects
from shoal.data.store.ingest import messages
from shoal.data.store.ingest.loop import take_in
from shoal.data.store.ingest.messages import TopicArrivals, parse_topic
from shoal.data.store.reader import open_store
from shoal.data.store.writer import BuildOptions


def test_an_address_names_servers_and_a_topic():
    assert parse_topic("kafka://a:1,b:2/clicks") == ("a:1,b:2", "clicks")
    for wrong in ("kafka://a:1", "kafka:///clicks", "kafka://a:1/", "kafka://a:1/b/c", "a:1/clicks"):
        with pytest.raises(RequestError, match="kafka://host:port/topic"):
            parse_topic(wrong)


class Topic:
    """Brokers of this process, and a producer."""

    def __init__(self):
        kafka = pytest.importorskip("confluent_kafka", reason="needs confluent-kafka: pip install 'shoal[kafka]'")
        self._producer = kafka.Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "mock"}, logger=None)
        (broker,) = self._producer.list_topics(timeout=10).brokers.values()
        self.servers = f"{broker.host}:{broker.port}"
        self.address = f"kafka://{self.servers}/clicks"

    def send(self, *values, partition=0):
        for value in values:
            content = value if isinstance(value, bytes) else json.dumps(value).encode()
            self._producer.produce("clicks", value=content, partition=partition)
        assert self._producer.flush(20) == 0


@pytest.fixture
def topic():
    return Topic()


def follow(topic, store, *, key=None, steps=(), **options):
    told, left = [], list(steps)

    def on_version(made, what):
        told.append((made.version, made.num_rows))
        if left:
            left.pop(0)()

    arrivals = TopicArrivals(topic.address, options=ReadOptions(**options))
    try:
        settings = BuildOptions(key=key)
        take_in(
            arrivals,
            str(store),
            options=settings,
            every_s=0.2,
            idle_s=0.5,
            is_over=lambda: False,
            on_version=on_version,
        )
    finally:
        arrivals.close()
    return told


def rows_of(store):
    reader = open_store(str(store))
    return reader.read(np.arange(len(reader)))


def test_messages_are_rows_once_over_starts_and_partitions(topic, tmp_path):
    store = tmp_path / "store"
    topic.send(*({"user": number, "x": number / 2} for number in range(10)))
    topic.send({"user": 100, "x": 1}, partition=1)
    more = [{"user": 10, "x": 5}]
    assert follow(topic, store, steps=[lambda: topic.send(*more)])[-1][1] == 12
    assert follow(topic, store) == [], "nothing comes twice"
    topic.send({"user": 11}, {"x": 6.5, "user": 12})
    assert follow(topic, store) == [(open_store(str(store)).version, 14)]
    found = rows_of(store)
    assert sorted(found["user"].values.tolist()) == [*range(13), 100]
    missing = dict(zip(found["user"].values.tolist(), found["x"].valid.tolist(), strict=True))
    assert missing[11] is False and missing[12] is True


def test_what_was_read_and_not_committed_is_read_again(topic, tmp_path, monkeypatch):
    store = tmp_path / "store"
    topic.send({"x": 1.5})
    follow(topic, store)
    topic.send({"x": 2.5}, {"x": 3.5})
    arrivals = TopicArrivals(topic.address)
    taken = open_store(str(store)).manifest
    # As if the process died between the read and the commit.
    assert arrivals.look(taken.source, taken.schema, 5.0).what == "2 messages of clicks"
    assert arrivals.look(taken.source, taken.schema, 5.0).what == "2 messages of clicks"
    arrivals.close()
    follow(topic, store)
    assert rows_of(store)["x"].values.tolist() == [1.5, 2.5, 3.5]


def test_messages_that_do_not_fit_are_named_or_kept_apart(topic, tmp_path):
    store, kept = tmp_path / "store", tmp_path / "rejects.jsonl"
    topic.send({"x": 1.5})
    follow(topic, store)
    bad = (b"{", b"[1]", {"x": "much"}, {"x": 1, "y": 2}, b"")
    for number, value in enumerate(bad):
        topic.send(value, {"x": 2.0})
        with pytest.raises(RequestError, match=f"partition 0, row {2 * number + 1}"):
            follow(topic, store)
        follow(topic, store, rejects=Rejects(kept, is_appended=True))
    assert len(open_store(str(store))) == 6
    assert len(kept.read_text().splitlines()) == len(bad)


def test_messages_that_are_gone_and_topics_that_are_not_there_are_refused(topic, tmp_path, monkeypatch):
    store = tmp_path / "store"
    topic.send({"x": 1.5}, {"x": 2.5})
    follow(topic, store)
    other = Topic()
    other.send({"x": 1.5})
    with pytest.raises(RequestError, match=r"up to message 2, and the topic has messages 0 to 1.*made anew"):
        follow(other, store)
    monkeypatch.setattr(messages, "_ANSWER_SECONDS", 1.0)
    other.address = "kafka://127.0.0.1:9/clicks"
    with pytest.raises(RunError, match="does not answer in 1 s"):
        follow(other, store)
