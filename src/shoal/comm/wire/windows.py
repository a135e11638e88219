"""Which messages were seen: a bounded window of sequence numbers for each sender, and a bounded number of senders.

A sender counts its messages, to whomever they go, so its numbers reach one receiver in rising order with gaps. A window is the
highest number seen and a bit for each of the ``WINDOW`` numbers below it; what is older than that counts as seen. The sender that
was silent longest is forgotten first.
"""

from collections import OrderedDict

WINDOW = 4096
"""Numbers below the highest that are told apart."""
SENDERS = 4096
"""Senders that are remembered."""
_MASK = (1 << WINDOW) - 1


class Windows:
    """The windows of all senders."""

    def __init__(self, *, max_senders: int = SENDERS) -> None:
        self._max_senders = max_senders
        # Bit k stands for the number ``highest - k``.
        self._seen: OrderedDict[str, tuple[int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def is_seen(self, sender: str, sequence: int) -> bool:
        """True when this message was noted before, or is too old to tell."""
        if sender not in self._seen:
            return False
        highest, bits = self._seen[sender]
        age = highest - sequence
        return age >= WINDOW or (age >= 0 and bool(bits >> age & 1))

    def note(self, sender: str, sequence: int) -> bool:
        """Note this message; False when it was seen before."""
        if self.is_seen(sender, sequence):
            return False
        highest, bits = self._seen.get(sender, (sequence, 0))
        if sequence > highest:
            bits = (bits << (sequence - highest)) & _MASK if sequence - highest < WINDOW else 0
            highest = sequence
        self._seen[sender] = (highest, bits | 1 << (highest - sequence))
        self._seen.move_to_end(sender)
        while len(self._seen) > self._max_senders:
            self._seen.popitem(last=False)
        return True

    def forget(self, sender: str) -> bool:
        """Drop a sender that is gone for good; False when it was not known."""
        return self._seen.pop(sender, None) is not None
