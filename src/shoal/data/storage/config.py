"""How long a storage may take, and how often a failed request is made again. No torch."""

from typing import Annotated

from pydantic import Field

from shoal.core.config import Config


class StorageConfig(Config):
    """Deadlines and retries of everything that is read from or written to an address."""

    deadline: Annotated[float, Field(gt=0)] = 120.0
    """Seconds that one read or write may take, all its retries included."""
    timeout: Annotated[float, Field(gt=0)] = 30.0
    """Seconds that a single request may go without an answer."""
    retries: Annotated[int, Field(ge=0)] = 5
    """How often a request that failed is made again."""
    backoff: Annotated[float, Field(ge=0)] = 0.1
    """Seconds before the first retry; each one waits twice as long as the one before, up to five seconds."""
    options: dict[str, str] = Field(default_factory=dict)
    """Settings for the store's own client, such as endpoint and region for S3; credentials are found as its client finds them."""
