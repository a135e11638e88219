"""What ``[pipeline]`` of a recipe can say: where stages begin. No torch."""

from typing import Literal

from pydantic import Field, field_validator

from shoal.core.config import Config
from shoal.core.errors import RequestError
from shoal.core.units import parse_bytes, parse_rate


class PipelineConfig(Config):
    """Where a model is cut into the stages of a pipeline, where it is not to be cut as Shoal finds best."""

    stages: list[str] = Field(default_factory=list)
    """Paths of the modules at which the second and later stages begin, in order; when empty, Shoal balances the stages."""
    balance: Literal["estimated", "measured"] = "estimated"
    """By estimated work, which gives the same cut on every machine, or by a measurement when the run starts."""
    memory: str | None = None
    """Most bytes of weights, their versions and activations on a pipeline rank, such as "2 GiB"."""

    network: str | None = None
    """Between two pipeline ranks, such as "10 GiB/s": a dry run then says which stages are worth several ranks."""

    @property
    def network_bytes(self) -> int | None:
        """``network`` as a number of bytes per second."""
        return None if self.network is None else parse_rate(self.network)

    @property
    def memory_bytes(self) -> int | None:
        """``memory`` as a number."""
        return None if self.memory is None else parse_bytes(self.memory)

    @field_validator("memory")
    @classmethod
    def _check_memory(cls, text: str | None) -> str | None:
        try:
            num_bytes = None if text is None else parse_bytes(text)
        except RequestError as error:
            raise ValueError(str(error)) from None
        if num_bytes == 0:
            raise ValueError(f"{text!r} is 0 bytes, which hold no model; leave memory out for no bound")
        return text

    @field_validator("network")
    @classmethod
    def _check_network(cls, text: str | None) -> str | None:
        try:
            rate = None if text is None else parse_rate(text)
        except RequestError as error:
            raise ValueError(str(error)) from None
        if rate == 0:
            raise ValueError(f"{text!r} carries nothing; leave network out")
        return text
