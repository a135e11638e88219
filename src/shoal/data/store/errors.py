"""What is wrong with a file of a store, by the file's name."""

from shoal.core.errors import RunError


class BrokenFile(RunError):
    """A file of a store is not what was written: torn, altered, missing, or made to harm."""

    def __init__(self, file: str, problem: str) -> None:
        super().__init__(f"{file}: {problem}")
        self.file = file
        """Its name in the store."""
        self.problem = problem
        """What is wrong with it, without the name."""
