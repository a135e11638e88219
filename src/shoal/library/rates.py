"""``shoal.find_rate``: a search for the learning rate inside a script's own run, after which the run is as it was before."""

from torch import nn

from shoal.core.errors import RequestError
from shoal.engine.callbacks.ratefinder import RateCurve
from shoal.engine.callbacks.ratefinder import find_rate as find_rate_of
from shoal.library.loader import RunLoader
from shoal.library.run import Run
from shoal.library.setups import others_frozen


def find_rate(
    run: Run,
    loader: RunLoader | None = None,
    *,
    low: float = 1e-6,
    high: float = 1.0,
    num_steps: int = 100,
    model: nn.Module | None = None,
) -> RateCurve:
    """Losses at learning rates that grow, and the rate at which the loss falls fastest. All ranks call it together.

    Weights, optimizer state, rates, random states and the loader's place are afterwards what they were before.

    Args:
        run: in which the model is set up.
        loader: whose batches are used; left out, the first of the run.
        low: the first rate.
        high: the last one.
        num_steps: how many rates are tried; the search ends before when the loss diverges.
        model: which one, where several are set up.

    Raises:
        RequestError: the rates do not grow, or no model is set up.
    """
    given: object = run
    if not isinstance(given, Run):
        raise RequestError(f"shoal.find_rate takes the shoal.Run in which a model is set up, and was given {given!r}")
    with run.searching(model) as (setups, own):
        if own.engine.islands is not None:
            raise RequestError(
                f"plan {str(run.plan)!r}: islands meet by the number of steps, which a search would change; search with dp alone"
            )
        batches = loader or run.loaders[0]
        place = batches.state_dict()
        try:
            with others_frozen(setups, own), own.calling():
                return find_rate_of(
                    own.engine, batches.steps(num_steps), low=low, high=high, num_steps=num_steps, step=own.num_passes
                )
        finally:
            batches.load_state_dict(place)
