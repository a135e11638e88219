"""Follows what a run publishes: loads a new version beside the one that serves, and swaps them by one assignment.

A version that does not prove whole is refused and counted, and the one before goes on; it is looked at again later, because a
disk may have been slow and a pointer may move on.
"""

import sys
import threading
import time
from pathlib import Path

from shoal.checkpoint.files import NotWhole
from shoal.checkpoint.published.versions import read_pointer
from shoal.checkpoint.whole import committed_names
from shoal.core.errors import RunError, ShoalError
from shoal.core.rundir import RunDir
from shoal.serve.models import BATCH, ServedModel, load_checkpoint, load_version

LOOK_SECONDS = 0.2
_AGAIN_SECONDS = 5.0


class NewestModel:
    """The newest whole model of a run, in memory.

    Args:
        run_dir: of the run.
        batch: rows of a pass.

    Raises:
        ShoalError: the run has neither a version nor a checkpoint that is whole.
    """

    def __init__(self, run_dir: Path, *, batch: int = BATCH) -> None:
        self._run, self._batch = RunDir(run_dir), batch
        self.refused = 0
        """Versions that were not whole, or could not be built."""
        self.swapped = 0
        """Versions that took the place of another."""
        self.last_refusal = ""
        """Why the last one was refused."""
        self._key: object = None
        self._refused_key: object = None
        self._again_at = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="newest model", daemon=True)
        found = self._look()
        if found is None:
            raise RunError(
                f"{run_dir} has no whole model to serve ({self.last_refusal or 'nothing was published or saved'}); train with "
                "publish.every_steps or checkpoint.every"
            )
        self.current: ServedModel = found
        """What answers now; replaced as a whole."""

    def start(self) -> None:
        """Follow from now on, in a thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop following."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    def _follow(self) -> None:
        while not self._stop.wait(LOOK_SECONDS):
            if (found := self._look()) is not None:
                self.current = found
                self.swapped += 1

    def _look(self) -> ServedModel | None:
        """A model that is newer than the one that serves; None where there is none, or it is refused."""
        key: object = None
        try:
            pointer = read_pointer(self._run.published)
            names = committed_names(self._run.checkpoints) if pointer is None else []
            key = pointer or (names[0] if names else None)
            if key in (None, self._key) or (key == self._refused_key and time.monotonic() < self._again_at):
                return None
            if pointer is None:
                found = load_checkpoint(self._run.root, batch=self._batch)
            else:
                found = load_version(self._run.published, pointer[0], expect=pointer[1], batch=self._batch)
        except NotWhole as error:
            # Of a pointer that is no pointer there is nothing to remember it by.
            self._refuse(key if key is not None else "pointer", error)
            return None
        except (ShoalError, OSError) as error:
            self._refuse(key, error)
            return None
        # The user's own module is built here, and what it raises must not end the thread that follows.
        except Exception as error:
            self._refuse(key, error)
            return None
        self._key = key
        return found

    def _refuse(self, key: object, error: Exception) -> None:
        if key != self._refused_key:
            self.refused += 1
            self.last_refusal = str(error)
            print(f"warning: a newer model is not served: {error}", file=sys.stderr, flush=True)
        self._refused_key, self._again_at = key, time.monotonic() + _AGAIN_SECONDS
