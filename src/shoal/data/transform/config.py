"""What a step of ``[[data.prepare]]`` can say: one frozen config for each kind of step. No torch."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from shoal.core.config import Config, tagged

Columns = Annotated[tuple[str, ...], Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]
Pixels = Annotated[int, Field(ge=1, le=4096)]


class FillConfig(Config):
    """Missing values get one."""

    step: Literal["fill"]
    """Which step this is."""
    columns: Columns
    """The columns."""
    how: Literal["constant", "mean", "median", "mode", "forward", "neighbours", "model"] = "mean"
    """constant: ``value``; forward: the value of the row before, of held-out rows without one that of the last training row;
    neighbours: the mean of the nearest training rows, of 16384 spread evenly where there are more; model: each column by ridge
    regression on the others, again and again."""
    value: float | str | None = None
    """With constant; and with forward, for rows that have none before them."""
    nan: bool = False
    """NaN counts as missing."""
    neighbours: Count = 5
    """With neighbours: how many."""
    rounds: Count = 10
    """With model: how often every column is filled anew."""
    penalty: Annotated[float, Field(gt=0)] = 1.0
    """With model: of the ridge regression."""

    @model_validator(mode="after")
    def _need_a_value(self) -> Self:
        if self.how == "constant" and self.value is None:
            raise ValueError('how = "constant" needs value')
        if self.how in ("neighbours", "model") and len(self.columns) < 2:
            raise ValueError(f'how = "{self.how}" fills a column by others; give two columns or more')
        return self


class ScaleConfig(Config):
    """Numbers on one scale."""

    step: Literal["scale"]
    """Which step this is."""
    columns: Columns
    """The columns."""
    how: Literal["standard", "minmax", "robust"] = "standard"
    """standard: mean 0 and variance 1; minmax: from 0 to 1; robust: median 0 and distance of the quartiles 1."""


class HashConfig(Config):
    """Texts or numbers as one of so many ids, by a hash."""

    step: Literal["hash"]
    """Which step this is."""
    columns: Columns
    """The columns."""
    buckets: Annotated[int, Field(ge=2, le=2**31)]
    """How many ids."""


class VocabularyConfig(Config):
    """Values as ids: the most frequent of the training rows; 0 is every other one."""

    step: Literal["vocabulary"]
    """Which step this is."""
    columns: Columns
    """The columns; each has a vocabulary of its own."""
    most: Annotated[int, Field(ge=1, le=2**24)] = 1 << 16
    """The largest vocabulary; a larger one is an error where ``cut`` does not allow to leave rare values out."""
    cut: bool = False
    """Rare values beyond ``most`` become 0."""


class BucketConfig(Config):
    """Numbers as the place of the bucket that they are in."""

    step: Literal["bucket"]
    """Which step this is."""
    columns: Columns
    """The columns."""
    edges: tuple[float, ...] | None = None
    """Where buckets end; quantiles of the training rows when left out."""
    buckets: Annotated[int, Field(ge=2)] = 10
    """How many, where edges are left out."""


class DateConfig(Config):
    """Parts of a time, each as a column ``NAME_PART``."""

    step: Literal["date"]
    """Which step this is."""
    columns: Columns
    """The columns."""
    parts: Annotated[tuple[Literal["year", "month", "day", "weekday", "hour", "minute"], ...], Field(min_length=1)] = (
        "month",
        "weekday",
        "hour",
    )
    """Which parts; Monday is 0."""


class NgramsConfig(Config):
    """Texts as counts of their n-grams of letters, hashed into a vector."""

    step: Literal["ngrams"]
    """Which step this is."""
    columns: Columns
    """The columns."""
    size: Count = 3
    """Letters of one."""
    buckets: Annotated[int, Field(ge=2, le=2**20)] = 256
    """Length of the vector."""


class ImageConfig(Config):
    """Files of images as pixels between 0 and 1: (channels, height, width)."""

    step: Literal["image"]
    """Which step this is."""
    columns: Columns
    """Columns of bytes, each a whole file: PNG, JPEG, BMP, GIF, WebP, TIFF or PPM."""
    size: tuple[Pixels, Pixels]
    """Height and width to which every image is stretched."""
    channels: Literal[1, 3] = 3
    """3: red, green and blue; 1: grey."""


class PcaConfig(Config):
    """The directions in which the training rows vary the most."""

    step: Literal["pca"]
    """Which step this is."""
    columns: Columns
    """Numbers."""
    to: str
    """The new column."""
    components: Count = 2
    """How many directions."""


class KmeansConfig(Config):
    """The nearest of so many centres."""

    step: Literal["kmeans"]
    """Which step this is."""
    columns: Columns
    """Numbers."""
    to: str
    """The new column, of ids."""
    clusters: Annotated[int, Field(ge=2)] = 8
    """How many centres."""
    rounds: Count = 20
    """Passes over the training rows at most."""
    seed: int = 0
    """Of the first centres, which are drawn from 4096 rows spread evenly over the training rows."""


class FilterConfig(Config):
    """Training rows that are left out; what is held out stays as it is."""

    step: Literal["filter"]
    """Which step this is."""
    columns: Columns
    """The columns that are looked at."""
    how: Literal["missing", "duplicates", "near_duplicates", "range", "zscore", "forest"]
    """missing: rows without a value; duplicates: rows equal to one before; near_duplicates: texts alike by MinHash; range:
    numbers
    outside; zscore: numbers far from the mean; forest: outliers by an isolation forest (scikit-learn)."""
    least: float | None = None
    """With range."""
    most: float | None = None
    """With range."""
    deviations: Annotated[float, Field(gt=0)] = 4.0
    """With zscore: how far."""
    alike: Annotated[float, Field(gt=0, le=1)] = 0.8
    """With near_duplicates: share of common shingles from which two texts are one."""
    share: Annotated[float, Field(gt=0, lt=0.5)] = 0.01
    """With forest: of the rows that are outliers."""
    seed: int = 0
    """Of the forest."""


AnyStep = (
    FillConfig
    | ScaleConfig
    | HashConfig
    | VocabularyConfig
    | BucketConfig
    | DateConfig
    | NgramsConfig
    | ImageConfig
    | PcaConfig
    | KmeansConfig
    | FilterConfig
)
StepConfig = tagged(
    FillConfig,
    ScaleConfig,
    HashConfig,
    VocabularyConfig,
    BucketConfig,
    DateConfig,
    NgramsConfig,
    ImageConfig,
    PcaConfig,
    KmeansConfig,
    FilterConfig,
    key="step",
)
