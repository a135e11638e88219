"""Who writes which piece, agreed by all ranks and kept for as long as nobody's holdings change.

What the others hold is only known by asking them, and asking must not hold up the training loop: it happens in the thread that
writes, between its votes. So the first save copies everything that this rank holds, and every later one only what this rank
was given to write. Each save compares the sums of all listings, so a change on any rank is seen by all of them.
"""

from collections.abc import Sequence

import xxhash

from shoal.checkpoint.files import NotWhole
from shoal.checkpoint.holdings import Cut, Listing, decode_listing, divide, encode_listing
from shoal.checkpoint.vote import Phase, SaveFailed, Votes
from shoal.core.clock import Deadline


def sum_of(listing: Listing | None) -> bytes:
    """The sum by which a change of a listing is seen; empty when a rank saves whole tensors only and lists nothing."""
    return b"" if listing is None else xxhash.xxh3_64_hexdigest(encode_listing(listing)).encode()


class Agreement:
    """The division of one group of ranks. Written by the thread that saves, read by the loop while that thread rests."""

    def __init__(self) -> None:
        self._sums: tuple[bytes, ...] = ()
        self._mine: tuple[Cut, ...] = ()
        self._rank = 0

    def expect(self, listing: Listing) -> tuple[Cut, ...] | None:
        """What this rank will have to write if nothing has changed; None when that is not known."""
        is_known = bool(self._sums) and self._sums[self._rank] == sum_of(listing)
        return self._mine if is_known else None

    def settle(
        self, listing: Listing, sums: Sequence[bytes], *, step: int, vote: Votes, deadline: Deadline
    ) -> tuple[Cut, ...]:
        """What this rank writes in this save. All ranks call it together; it asks only when some rank's sum is a new one.

        Args:
            listing: what this rank holds.
            sums: of the listings of all ranks, by rank.
            step: the step that is being saved.
            vote: how to ask.
            deadline: when to stop waiting for the others.

        Raises:
            SaveFailed: together the ranks do not hold every tensor, or one could not say what it holds; on all ranks alike.
            LostTouch: a rank did not come.
        """
        if tuple(sums) == self._sums:
            return self._mine
        self._sums = ()
        texts = vote.exchange(step, Phase.LIST, deadline, text=encode_listing(listing))
        try:
            shares = divide([decode_listing(text) for text in texts])
        except NotWhole as error:
            raise SaveFailed(str(error)) from error
        self._sums, self._mine, self._rank = tuple(sums), tuple(shares[vote.rank]), vote.rank
        return self._mine
