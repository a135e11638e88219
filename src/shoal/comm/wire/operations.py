"""The table of operations: what may be asked on the wire, the types of question and answer, and how long they may be.

The wire knows no operation by itself; the rooms above say theirs::

    class Pull(Body, frozen=True):
        shard: int
        need: int

    OPERATIONS = Operations({"pull": Op(Pull, Pulled, max_payload=1 << 30), "beat": Op(Beat, Beaten, max_payload=0)})
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from shoal.comm.wire.errors import Dropped
from shoal.comm.wire.message import BODY_BYTES, Envelope

_DEFAULT_PAYLOAD = 1 << 30


class Body(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a body may derive from: strict and compact. Any msgspec Struct will do."""


class Refusal(Body, frozen=True):
    """The body of an answer that says no."""

    code: str
    text: str


class Taken(Body, frozen=True):
    """The body of a note that a payload in shared memory is not needed any more."""


@dataclass(frozen=True)
class Op:
    """One operation."""

    request: type[msgspec.Struct]
    answer: type[msgspec.Struct]
    max_payload: int = _DEFAULT_PAYLOAD
    """Bytes of the longest payload, of the request and of the answer; 0 when none is allowed."""
    max_body: int = BODY_BYTES
    """Bytes of the longest body in msgpack."""
    fenced: bool = True
    """True when a request that was sent under an epoch before this process's is refused as stale."""

    def check_sizes(self, envelope: Envelope) -> None:
        """Compare a message with the limits.

        Raises:
            Dropped: ``oversized``.
        """
        num_body = envelope.body.nbytes
        if envelope.num_bytes > self.max_payload or num_body > self.max_body:
            text = (
                f"{envelope.header.operation}: a payload of {envelope.num_bytes} bytes and a body of {num_body}; "
                f"the limits are {self.max_payload} and {self.max_body}"
            )
            raise Dropped("oversized", text, envelope.header)


class Operations:
    """Operations by name and by the type of their request."""

    def __init__(self, table: Mapping[str, Op]) -> None:
        assert not any(name.startswith("!") for name in table), sorted(table)
        self._table = dict(table)
        self._names: dict[type[msgspec.Struct], str] = {}
        for name, op in self._table.items():
            assert name and len(name) <= 64, name
            assert op.max_body <= BODY_BYTES, (name, op.max_body)
            assert op.request not in self._names, f"{op.request.__name__} is the request of two operations"
            self._names[op.request] = name
        self._encoder = msgspec.msgpack.Encoder()
        self._requests = {name: msgspec.msgpack.Decoder(op.request, strict=True) for name, op in self._table.items()}
        self._answers = {name: msgspec.msgpack.Decoder(op.answer, strict=True) for name, op in self._table.items()}
        self._refusals = msgspec.msgpack.Decoder(Refusal, strict=True)

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __contains__(self, name: str) -> bool:
        return name in self._table

    def __getitem__(self, name: str) -> Op:
        return self._table[name]

    def __or__(self, other: "Operations") -> "Operations":
        """Both tables as one; a process that serves two rooms has one node."""
        assert not set(self) & set(other)
        return Operations({name: table[name] for table in (self, other) for name in table})

    def name_of(self, body: msgspec.Struct) -> str:
        """The operation whose request ``body`` is."""
        assert type(body) in self._names, f"{type(body).__name__} is the request of no operation of this node"
        return self._names[type(body)]

    def encode(self, body: msgspec.Struct) -> bytes:
        """The second frame."""
        return self._encoder.encode(body)

    def decode_request(self, name: str, frame: bytes | memoryview) -> Any:
        """The body of a request.

        Raises:
            Dropped: ``malformed``.
        """
        return _decode(self._requests[name], frame, name)

    def decode_answer(self, name: str, frame: bytes | memoryview) -> Any:
        """The body of an answer; see ``decode_request``."""
        return _decode(self._answers[name], frame, name)

    def decode_refusal(self, frame: bytes | memoryview) -> Refusal:
        """The body of an answer that says no; see ``decode_request``."""
        refusal = _decode(self._refusals, frame, "refusal")
        assert isinstance(refusal, Refusal)
        return refusal


def _decode(decoder: "msgspec.msgpack.Decoder[Any]", frame: bytes | memoryview, name: str) -> Any:
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Dropped("malformed", f"body of {name}: {error}") from error
