"""How much each split gets where data is split by position: the first part trains, the last parts are held out. No torch."""

from shoal.core.errors import RequestError


def split_positions(
    total: int, validation: float, test: float, *, needed: int = 1, what: str = "samples"
) -> tuple[range, range, range]:
    """The positions of train, validation and test.

    Args:
        total: how many things there are.
        validation: share held out for validation.
        test: share held out for the test.
        needed: the fewest things a split of a share above zero must have; a small share is rounded up to it.
        what: the things, for the message.

    Raises:
        RequestError: there are too few for every split.
    """
    num_validation = max(round(total * validation), needed) if validation > 0 else 0
    num_test = max(round(total * test), needed) if test > 0 else 0
    num_train = total - num_validation - num_test
    if num_train < needed and total * (1 - validation - test) > 0 and num_validation + num_test > 2 * needed:
        # Both shares were rounded up to everything: what training needs comes out of the larger of them.
        missing = needed - num_train
        num_validation, num_test = (
            (num_validation - missing, num_test) if num_validation >= num_test else (num_validation, num_test - missing)
        )
        num_train = needed
    if num_train < needed:
        splits = 1 + (validation > 0) + (test > 0)
        each = f"one sequence of {needed - 1} needs {needed}" if needed > 1 else "each split needs 1"
        raise RequestError(
            f"the data has {total} {what} and {each}: {splits} splits need at least {splits * needed}; give more data, "
            f"{'lower data.sequence, ' if needed > 1 else ''}or set data.validation and data.test to 0"
        )
    held_out = num_train + num_validation
    return range(num_train), range(num_train, held_out), range(held_out, total)
