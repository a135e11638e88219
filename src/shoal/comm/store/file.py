"""The file in which the ranks of one host meet: torch's ``FileStore`` reads and writes it, and no stranger can open it."""

import os
import shutil
import sys
import tempfile

NAME = "shoal-store"
"""Of the file, where it has none in a folder."""


class StoreFile:
    """The file in which the ranks of one generation, or of one view, meet (torch's ``FileStore``), for this user alone.

    On Linux it has no name: the ranks inherit its descriptor, and nothing is left when they are gone, however they ended.
    Elsewhere it lies in a folder that only this user can enter, until ``close``.
    """

    def __init__(self) -> None:
        self.descriptors: tuple[int, ...] = ()
        """What a rank has to inherit."""
        self._folder = ""
        if sys.platform == "linux":
            self.descriptors = (os.memfd_create(NAME),)
            self.path = f"/proc/self/fd/{self.descriptors[0]}"
            self.shared_path = f"/proc/{os.getpid()}/fd/{self.descriptors[0]}"
            """What a process that did not inherit the descriptor opens, while this one has not closed it."""
        else:
            self._folder = tempfile.mkdtemp(prefix="shoal-store-")
            self.path = self.shared_path = os.path.join(self._folder, "store")

    def close(self) -> None:
        """Let go of it; ranks that run keep what they inherited. May be called twice."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = ()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
