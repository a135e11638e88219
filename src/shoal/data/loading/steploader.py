"""A loader for the user's own loop: global steps, epoch by epoch as torch has them, from any position.

    loader = StepLoader(dataset, global_batch=32, options=LoaderOptions(num_workers=2))
    for epoch in range(loader.epoch, 3):
        for batch in loader:            # to the end of the epoch; after load_state_dict, what is left of it
            ...
    for batch in loader.steps(300):     # or so many steps, over epochs

Batches are those that one process would read, whatever the number of replicas, and ``state_dict`` is the same on all of them.
"""

from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

from shoal.comm.world import World
from shoal.core.errors import RequestError
from shoal.data.loading.loader import Loader, StepBatch
from shoal.data.loading.parts import build_order
from shoal.data.options import LoaderOptions
from shoal.data.order import Position
from shoal.data.source import Source, Splits, Streamed
from shoal.data.sources.anyset import splits_of
from shoal.data.spec import UNKNOWN_LENGTH
from shoal.data.streams.shards import gather_position, shards_itself


class StepLoader:
    """The batches of one replica, step by step.

    Args:
        dataset: map-style or iterable, with items ``(inputs, targets)`` or one dict; or a ``Source``, or ``Splits``, whose
            training split is loaded.
        global_batch: samples per step, of all replicas; the most of one with ``max_tokens``.
        micro_batch: samples per forward pass; a replica's whole share when left out.
        seed: of the order of samples.
        options: how samples are ordered, made to batches and loaded.
        world: the processes, which a dataset that shards itself is read by together.

    Raises:
        RequestError: the dataset is none, or the options do not fit it.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch: int,
        micro_batch: int | None = None,
        seed: int = 0,
        options: LoaderOptions | None = None,
        world: World | None = None,
    ) -> None:
        if global_batch < 1:
            raise RequestError(f"global_batch is {global_batch}, and must be 1 or more")
        self.options = options or LoaderOptions()
        self.splits: Splits = splits_of(dataset, self.options, seed=seed)
        """The data as the engine takes it; only the training split has samples, unless splits were given."""
        self.global_batch = global_batch
        self.micro_batch = micro_batch
        self._seed, self._world = seed, world
        self._replica, self._num_replicas, self._num_islands = 0, 1, 1
        self._position = Position()
        self._loader: Loader | None = None
        self._ahead: StepBatch | None = None
        """The first batch of the next epoch, where only reading it could tell that an epoch was over."""
        if not self._is_stream:
            self._order = build_order(self.source, global_batch=global_batch, seed=seed, options=self.options)
        if micro_batch is not None:
            self.place(micro_batch=micro_batch)

    @property
    def source(self) -> Source:
        """Of the samples: for looks at their shapes, and for evaluation."""
        return self.splits.train

    @property
    def _is_stream(self) -> bool:
        return isinstance(self.source, Streamed)

    @property
    def _shards_itself(self) -> bool:
        return isinstance(self.source, Streamed) and shards_itself(self.source.dataset)

    def place(
        self, *, replica: int = 0, num_replicas: int = 1, micro_batch: int | None = None, num_islands: int = 1
    ) -> None:
        """Say which replica this process is of, before the first batch or between two.

        Args:
            replica: its number.
            num_replicas: how many there are.
            micro_batch: samples per forward pass; what it was before when left out.
            num_islands: groups of replicas, of which each has a mean loss of its own.

        Raises:
            RequestError: replicas or microbatches do not divide the global batch.
        """
        if micro_batch is not None and micro_batch < 1:
            raise RequestError(f"micro_batch is {micro_batch}, and must be 1 or more")
        if self.global_batch % num_replicas:
            raise RequestError(
                f"global_batch {self.global_batch} is not divisible by the {num_replicas} replicas of the plan: they would get "
                f"unequal batches; set it to {-(-self.global_batch // num_replicas) * num_replicas}, or change dp"
            )
        size = micro_batch or self.micro_batch
        share = self.global_batch // num_replicas
        if size is not None and share % size:
            raise RequestError(
                f"micro_batch {size} does not divide the {share} samples per replica (global_batch {self.global_batch} / "
                f"{num_replicas} replicas); set it to a divisor of {share}"
            )
        if num_replicas > 1 and self._shards_itself and self._world is None:
            raise RequestError(
                f"the {num_replicas} replicas of a dataset that shards itself tell each other how far they are; give world=, or "
                "use run.loader(...) of a shoal.Run"
            )
        self.micro_batch = size
        self._replica, self._num_replicas, self._num_islands = replica, num_replicas, num_islands
        self._reopen(self._position)

    # --- batches

    def __iter__(self) -> Iterator[StepBatch]:
        """The steps up to the end of this epoch. The next ``iter`` begins the next one."""
        epoch = self.epoch
        while self.epoch == epoch:
            batch = self._peek()
            if batch.epoch != epoch:
                # The stream had ended with the batch before, and says so only now.
                self._position = Position(epoch=batch.epoch)
                return
            yield self.next()

    def steps(self, count: int) -> Iterator[StepBatch]:
        """So many steps, over epochs."""
        for _ in range(count):
            yield self.next()

    def next(self) -> StepBatch:
        """The next step's batch, of the next epoch where this one is over.

        Raises:
            RunError: it did not come in time, or a loader process died.
            Exception: whatever the dataset raised while it was loading.
        """
        batch, self._ahead = self._peek(), None
        self._position = batch.position
        return batch

    def _peek(self) -> StepBatch:
        if self._ahead is None:
            self._ahead = self._open().next()
        return self._ahead

    def __len__(self) -> int:
        """Steps of an epoch.

        Raises:
            TypeError: nobody knows before its end: an iterable dataset without a length, or batches by ``max_tokens``.
        """
        if not self._is_stream:
            steps = self._order.steps_per_epoch(self._position.epoch)
            if steps is None:
                raise TypeError(
                    "with max_tokens the steps of an epoch are not known before it was read; count them, or use steps(n)"
                )
            return steps
        if self._shards_itself:
            raise TypeError("an epoch of a dataset that shards itself has the steps of its longest shard; use steps(n)")
        if (samples := len(self.source)) == UNKNOWN_LENGTH:
            raise TypeError(
                "an iterable dataset without __len__ has an unknown number of steps; give it one, or use steps(n)"
            )
        return samples // self.global_batch if self.options.drop_last else -(-samples // self.global_batch)

    # --- where it is

    @property
    def epoch(self) -> int:
        """That the next batch is of, as far as is known before it is read."""
        return self._position.epoch

    @property
    def position(self) -> Position:
        """After the last batch that was handed out."""
        return self._position

    @property
    def why_slow_to_resume(self) -> str | None:
        """Why going on in the middle of an epoch reads again what was trained on, for people; None where it goes on at once."""
        reason = getattr(self.source, "why_not_resumable", None)
        if reason is None:
            return None
        return (
            f"{reason}: a resumed run reads the samples of the epoch that were trained on again and drops them (none is "
            "repeated, none is lost); give the dataset state_dict and load_state_dict to go on at once"
        )

    def state_dict(self) -> dict[str, Any]:
        """Where the data is after the last batch that was handed out; JSON values, the same on every replica.

        All ranks call it together where the dataset shards itself: it holds the place of each.
        """
        position = self._position
        if self._shards_itself and self._world is not None:
            position = gather_position(position, self._world)
        found: dict[str, Any] = {"epoch": position.epoch, "offset": position.offset, "seed": self._seed}
        if position.stream:
            found["stream"] = position.stream
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another loader of the same data was, on any number of replicas, unless the dataset shards itself.

        Raises:
            RequestError: the values are of no loader, or of one with another seed, whose order is another.
        """
        try:
            position = Position(
                epoch=int(state["epoch"]), offset=int(state["offset"]), stream=str(state.get("stream", ""))
            )
            seed = int(state.get("seed", self._seed))
        except (KeyError, TypeError, ValueError) as error:
            raise RequestError(f"this is no state of a loader: {error!r}; give what state_dict returned") from error
        if position.epoch < 0 or position.offset < 0:
            raise RequestError(f"a loader cannot be at sample {position.offset} of epoch {position.epoch}")
        if seed != self._seed:
            raise RequestError(
                f"the loader's state is of seed {seed} and this loader has seed {self._seed}: samples would come twice or never; "
                f"use seed {seed}"
            )
        self._reopen(position)

    def close(self) -> None:
        """Stop loading ahead and end loader processes. May be called twice."""
        if self._loader is not None:
            self._loader.close()
        self._loader, self._ahead = None, None

    def __enter__(self) -> "StepLoader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _reopen(self, position: Position) -> None:
        self.close()
        self._position = position

    def _open(self) -> Loader:
        """Only when a batch is asked for: loader processes belong to who trains, not to who describes."""
        if self._loader is None:
            self._loader = Loader(
                self.source,
                global_batch=self.global_batch,
                micro_batch=self.micro_batch or self.global_batch // self._num_replicas,
                replica=self._replica,
                num_replicas=self._num_replicas,
                num_islands=self._num_islands,
                seed=self._seed,
                position=self._position,
                prefetch=self.options.prefetch,
                workers=self.options.num_workers,
                deadline_s=self.options.deadline_s,
                options=self.options,
                world=self._world,
            )
        return self._loader
