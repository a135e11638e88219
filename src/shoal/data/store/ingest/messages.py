"""A topic of Kafka as a source that grows: each message is one row, a JSON object, and is taken in once.

How far each partition is read is committed with the rows, in the store's own version, and nowhere else: no group of consumers,
no commit that could come before or after the rows. Whoever is killed and starts again goes on behind the last row of the store.
It speaks by ``confluent-kafka`` (librdkafka).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shoal.core.clock import Deadline
from shoal.core.errors import RequestError, RunError
from shoal.data.formats.jsonlines import parse_row, schema_of_rows, table_of_rows, unknown_key
from shoal.data.formats.options import ReadOptions
from shoal.data.store.ingest.arrivals import Arrived
from shoal.data.table import Schema, Table

MOST_MESSAGES = 10_000
"""Of one version."""
_ANSWER_SECONDS = 30.0
_POLL_SECONDS = 0.1
_FETCH_MS = 100


def parse_topic(address: str) -> tuple[str, str]:
    """The servers and the topic of ``kafka://host:port,host:port/topic``.

    Raises:
        RequestError: it names none.
    """
    servers, slash, topic = address.removeprefix("kafka://").partition("/")
    if not address.startswith("kafka://") or not servers or not slash or not topic or "/" in topic:
        raise RequestError(f"{address!r} names no topic; write kafka://host:port/topic")
    return servers, topic


class TopicArrivals:
    """Reads a topic.

    Args:
        address: ``kafka://host:port/topic``.
        options: which columns, and what becomes of messages that do not fit.
        settings: of librdkafka, such as ``security.protocol``.

    Raises:
        RequestError: ``confluent-kafka`` is not installed, refuses the settings, or there is no such topic.
        RunError: nobody answers.
    """

    def __init__(
        self, address: str, *, options: ReadOptions | None = None, settings: Mapping[str, str] | None = None
    ) -> None:
        try:
            import confluent_kafka
        except ImportError:
            raise RequestError(f"{address} needs confluent-kafka: pip install 'shoal[kafka]'") from None
        self._kafka: Any = confluent_kafka
        self._address, self._options = address, options or ReadOptions()
        servers, self._topic = parse_topic(address)
        own = {
            "bootstrap.servers": servers,
            # Asked for by the library; nothing is ever committed to it.
            "group.id": "shoal",
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "allow.auto.create.topics": False,
        }
        # Brokers answer when there is something, or after this time; half a second is librdkafka's own.
        quick = {"fetch.wait.max.ms": _FETCH_MS, "fetch.error.backoff.ms": _FETCH_MS}
        try:
            self._consumer: Any = confluent_kafka.Consumer({**quick, **(settings or {}), **own}, logger=_Silent())
        except confluent_kafka.KafkaException as error:
            raise RequestError(f"{address}: librdkafka refuses it: {_reason(error)}") from error
        self._next: dict[int, int] = {}

    def look(self, taken: Mapping[str, Any], schema: Schema | None, seconds: float) -> Arrived | None:
        """See ``Arrivals``."""
        self._assign({number: taken.get(self._key(number)) for number in self._partitions()})
        messages = self._gather(seconds)
        if not messages:
            return None
        reached = dict(self._next)
        for partition, offset, _ in messages:
            reached[partition] = max(reached[partition], offset + 1)
        moved = [number for number in reached if reached[number] != self._next[number]]
        messages.sort(key=lambda one: one[:2])
        rows = self._parse(messages)
        if schema is None:
            # Of numbers that no row has there would be no columns; what does not fit is in the rejects by now.
            found = [one for part in rows.values() for one in part]
            schema = schema_of_rows(self._topic, found, self._options) if found else None
        # Positions move on only when the store says so: what was read and not committed is read again.
        self._next = reached
        if schema is None:
            return None
        return Arrived(
            tables=list(self._tables(rows, schema)),
            schema=schema,
            offsets={self._key(number): reached[number] for number in moved},
            after={self._key(number): taken.get(self._key(number)) for number in moved},
            what=f"{len(messages)} messages of {self._topic}",
        )

    def close(self) -> None:
        """See ``Arrivals``."""
        self._consumer.close()

    def _key(self, partition: int) -> str:
        return f"topic {self._topic} {partition}"

    def _partitions(self) -> list[int]:
        try:
            found = self._consumer.list_topics(self._topic, timeout=_ANSWER_SECONDS).topics[self._topic]
        except self._kafka.KafkaException as error:
            raise RunError(f"{self._address} does not answer in {_ANSWER_SECONDS:g} s: {_reason(error)}") from error
        if found.error is not None or not found.partitions:
            raise RequestError(f"{self._address}: there is no such topic ({found.error or 'it has no partition'})")
        return sorted(found.partitions)

    def _assign(self, taken: Mapping[int, Any]) -> None:
        """Read on behind what the store has; a partition that it has nothing of from its beginning."""
        wanted = {}
        for number, reached in taken.items():
            if reached is not None and self._next.get(number) == reached:
                wanted[number] = reached
                continue
            low, high = self._watermarks(number)
            if reached is None:
                wanted[number] = low
            elif not low <= reached <= high:
                raise RequestError(
                    f"{self._address}: the store has taken in partition {number} up to message {reached}, and the topic has "
                    f"messages {low} to {high}; what is between was deleted, or the topic was made anew: begin another store"
                )
            else:
                wanted[number] = reached
        if wanted != self._next:
            self._consumer.assign([self._kafka.TopicPartition(self._topic, *one) for one in wanted.items()])
            self._next = wanted

    def _watermarks(self, partition: int) -> tuple[int, int]:
        """The first message that is there, and the number that the next one will have."""
        place = self._kafka.TopicPartition(self._topic, partition)
        try:
            low, high = self._consumer.get_watermark_offsets(place, timeout=_ANSWER_SECONDS)
        except self._kafka.KafkaException as error:
            raise RunError(f"{self._address} does not answer in {_ANSWER_SECONDS:g} s: {_reason(error)}") from error
        return int(low), int(high)

    def _gather(self, seconds: float) -> list[tuple[int, int, bytes | None]]:
        """Messages until there are enough, or there were some and no more come, or the time is over."""
        found: list[tuple[int, int, bytes | None]] = []
        limit = Deadline(seconds=max(seconds, _POLL_SECONDS))
        while len(found) < MOST_MESSAGES and not limit.is_over:
            got = self._consumer.consume(MOST_MESSAGES - len(found), timeout=_POLL_SECONDS)
            for message in got:
                if (error := message.error()) is not None:
                    raise RunError(f"{self._address}: {error.str()}")
                found.append((message.partition(), message.offset(), message.value()))
            if found and not got:
                break
        return found

    def _parse(self, messages: Sequence[tuple[int, int, bytes | None]]) -> dict[int, list[tuple[int, dict[str, Any]]]]:
        """The objects of each partition, with their offsets."""
        found: dict[int, list[tuple[int, dict[str, Any]]]] = {}
        for partition, offset, value in messages:
            try:
                found.setdefault(partition, []).append((offset, parse_row(value or b"")))
            except ValueError as error:
                self._options.rejects.add(self._name(partition), offset, None, str(error), value)
        return found

    def _tables(self, rows: Mapping[int, list[tuple[int, dict[str, Any]]]], schema: Schema) -> Iterator[Table]:
        names = set(schema.names)
        with self._options.rejects:
            for partition, part in rows.items():
                good = []
                for offset, row in part:
                    if (unknown := unknown_key(row, names, self._options)) is None:
                        good.append((offset, row))
                    else:
                        why = "the store has no such column; choose columns with --columns A,B"
                        self._options.rejects.add(self._name(partition), offset, unknown, why, row)
                if good:
                    numbers, values = [one[0] for one in good], [one[1] for one in good]
                    yield table_of_rows(self._name(partition), schema, values, numbers, self._options)

    def _name(self, partition: int) -> str:
        return f"topic {self._topic}, partition {partition}"


class _Silent:
    """What librdkafka says of itself goes nowhere: what matters comes as an error."""

    def log(self, *said: Any) -> None:
        """Say nothing."""


def _reason(error: Any) -> str:
    found = error.args[0] if error.args else error
    return str(found.str() if hasattr(found, "str") else found)
