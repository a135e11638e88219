"""The keys of one generation of a run on several hosts, with torch's rules for them, and who waits for which.

No socket and no thread: the coordinator brings questions, and sends the answers that come out.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shoal.comm.store.messages import Answer, Ask
from shoal.core.clock import Deadline

Reply = Callable[[Answer], None]


@dataclass(frozen=True, kw_only=True)
class _Waiting:
    ask: Ask
    reply: Reply
    limit: Deadline


class StoreTable:
    """A store of keys and values; every question is answered once, now or when its keys are there or its time is over."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: list[_Waiting] = []
        self._prefix = ""

    def move_on(self, prefix: str) -> None:
        """Ranks assemble anew, under keys with another prefix: forget all others, and let nobody wait for them any more."""
        self._prefix = prefix
        self._values = {key: value for key, value in self._values.items() if key.startswith(prefix)}
        for waiting in [one for one in self._waiting if self._is_over(one.ask)]:
            self._waiting.remove(waiting)
            waiting.reply(self._refusal(waiting.ask))

    def ask(self, ask: Ask, reply: Reply) -> None:
        """Take a question; ``reply`` gets the answer."""
        if ask.operation in ("get", "wait"):
            if self._is_over(ask):
                reply(self._refusal(ask))
            elif self._has(ask):
                reply(self._found(ask))
            else:
                self._waiting.append(_Waiting(ask=ask, reply=reply, limit=Deadline(seconds=ask.seconds)))
            return
        reply(self._act(ask))
        if ask.operation in ("set", "add", "compare_set"):
            self._serve()

    def expire(self) -> None:
        """Answer those that have waited for too long."""
        for waiting in [one for one in self._waiting if one.limit.is_over]:
            self._waiting.remove(waiting)
            missing = [key for key in waiting.ask.keys if key not in self._values]
            waiting.reply(
                Answer(
                    number=waiting.ask.number,
                    error=f"waited {waiting.ask.seconds:g} s for {', '.join(missing[:3])}, which no rank has set",
                )
            )

    def _is_over(self, ask: Ask) -> bool:
        return not all(key.startswith(self._prefix) for key in ask.keys)

    def _refusal(self, ask: Ask) -> Answer:
        return Answer(
            number=ask.number, error=f"the ranks assemble anew, under {self._prefix}, and nobody sets this any more"
        )

    def _serve(self) -> None:
        for waiting in [one for one in self._waiting if self._has(one.ask)]:
            self._waiting.remove(waiting)
            waiting.reply(self._found(waiting.ask))

    def _has(self, ask: Ask) -> bool:
        return all(key in self._values for key in ask.keys)

    def _found(self, ask: Ask) -> Answer:
        return Answer(number=ask.number, value=self._values[ask.keys[0]] if ask.operation == "get" else b"")

    def _act(self, ask: Ask) -> Answer:
        number, key = ask.number, next(self._keys(ask), "")
        if ask.operation == "set":
            self._values[key] = ask.value
        elif ask.operation == "add":
            try:
                total = int(self._values.get(key, b"0")) + ask.amount
            except ValueError:
                return Answer(number=number, error=f"{key} is no number, and cannot be added to")
            self._values[key] = str(total).encode()
            return Answer(number=number, amount=total)
        elif ask.operation == "compare_set":
            return Answer(number=number, value=self._compare_set(key, ask))
        elif ask.operation == "check":
            return Answer(number=number, amount=int(self._has(ask)))
        elif ask.operation == "delete":
            return Answer(number=number, amount=int(self._values.pop(key, None) is not None))
        return Answer(number=number, amount=len(self._values))

    def _compare_set(self, key: str, ask: Ask) -> bytes:
        now = self._values.get(key)
        if now is None and ask.expected:
            return ask.expected  # as torch's own stores do
        if now is None or now == ask.expected:
            self._values[key] = ask.value
        return self._values[key]

    @staticmethod
    def _keys(ask: Ask) -> Iterator[str]:
        return iter(ask.keys)
