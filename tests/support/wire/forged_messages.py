"""Wrong messages of every kind, made from a seed: what a storm of requests and a lying peer have in common."""

import random

import msgspec

from shoal.comm.wire.arena import identify_folder
from shoal.comm.wire.message import ITEM_BYTES, PROTOCOL_VERSION, Header, Place, pack, pack_chunk

_MOST_DAMAGED = 500
"""Bytes at the beginning of a frame among which some are damaged: the rest of a long payload is all alike."""


class Forger:
    """Makes messages. Each kind of wrong one is a method, which returns its frames, or several messages that belong together.

    Args:
        seed: of all that is drawn.
        arenas: the folder of shared memory that messages say they know.
        sender: the instance that they say they are from.
        wrong_bodies: values that the operation does not have as its body.
    """

    def __init__(self, seed, arenas, *, sender, wrong_bodies) -> None:
        self.source = random.Random(seed)
        self.folder = identify_folder(arenas)
        self.sender = sender
        self.wrong_bodies = wrong_bodies

    def fields(self):
        """Of the header of a right message, beside what all have in common."""
        raise NotImplementedError

    def body(self):
        """Encoded, of a message that is given none."""
        raise NotImplementedError

    def pack(self, body=None, payload=None, **fields):
        """A message with a right seal, whatever it says."""
        values = {
            "version": PROTOCOL_VERSION,
            "sender": self.sender,
            "operation": "echo",
            "dtype": "",
            "shape": (),
            "place": None,
            "folder": self.folder,
        }
        view = None if payload is None else memoryview(payload)
        header = Header(**(values | self.fields() | fields))
        return [bytes(frame) for frame in pack(header, self.body() if body is None else body, view)]

    def damage(self, frames):
        """Some bits of a message are flipped, so that at least one is."""
        damaged = [bytearray(frame) for frame in frames]
        places = [
            (number, bit) for number, frame in enumerate(damaged) for bit in range(8 * min(len(frame), _MOST_DAMAGED))
        ]
        for number, bit in self.source.sample(places, self.source.randint(1, 6)):
            damaged[number][bit // 8] ^= 1 << bit % 8
        return [bytes(frame) for frame in damaged]

    def random_bytes(self):
        source = self.source
        return [source.randbytes(source.choice((0, 1, 8, 30, 300, 3000))) for _ in range(source.randint(1, 8))]

    def flipped_chunk(self):
        return self.damage([bytes(frame) for frame in pack_chunk(3, 0, memoryview(self.source.randbytes(50)))])

    def other_version(self):
        return self.pack(version=self.source.choice([0, PROTOCOL_VERSION + 1, 255]))

    def too_many_frames(self):
        frames = self.pack()
        return [*frames[:-1], *([b"x"] * self.source.randint(2, 40)), frames[-1]]

    def too_few_frames(self):
        return self.pack()[: self.source.randint(1, 2)]

    def shape_bomb(self):
        shape = self.source.choice([(2**40,), (2**40,) * 8, (2**32, 2**32), (2**31, 2, 0 + 1), (81 << 20,)])
        return self.pack(dtype=self.source.choice(list(ITEM_BYTES)), shape=shape)

    def length_bomb(self):
        """Lengths of four billion, in the body and in the header, where a decoder might ask for memory first."""
        bomb = self.source.choice([b"\xdd", b"\xdf", b"\xdb", b"\xc6"]) + b"\xff\xff\xff\xff"
        if self.source.random() < 0.5:
            return self.pack(body=b"\x92" + bomb)
        whole = self.pack()[0]
        at = self.source.randrange(1, len(whole))
        return [whole[:at] + bomb + whole[at:], self.body(), b"\0" * 8]

    def wrong_dtype(self):
        dtype = self.source.choice(["object", "float128", "O", "<f4", "float", "uint64", "pickle"])
        return self.pack(dtype=dtype, shape=(4,), payload=b"1234")

    def wrong_length(self):
        payload = self.source.randbytes(self.source.randint(1, 200))
        frames = self.pack(dtype="float32", shape=(self.source.choice([0, len(payload) // 4 + 1, 1000]),))
        return [*frames[:-1], payload, frames[-1]]

    def wrong_body(self):
        return self.pack(body=msgspec.msgpack.encode(self.source.choice(self.wrong_bodies)))

    def place_outside(self):
        """In no arena, or beyond the end of one; the first of the names is a file of a megabyte."""
        own = f"{self.sender}-1.arena"
        others = [f"{self.sender}-2.arena", "../secret", "/etc/passwd", "a" * 100, f"{own}/..", "", "\0"]
        num_bytes = self.source.choice([(1 << 20) + 1, 2**24])
        place = Place(self.source.choice([own, *others]), self.source.choice([0, 1, 2**20, 2**61]), num_bytes)
        return self.pack(dtype="uint8", shape=(num_bytes,), place=place)

    def broken_stream(self, num_bytes=4 << 20):
        """A payload is announced rightly, and then comes a chunk that is not the first."""
        announced = self.pack(dtype="uint8", shape=(num_bytes,))
        sequence = msgspec.msgpack.decode(announced[0])[3]
        return [announced, [bytes(frame) for frame in pack_chunk(sequence, 2, memoryview(b"x" * 100))]]
