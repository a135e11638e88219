"""What ``[data]`` of a recipe can say: one frozen config per source, and one for the user's own data. No torch."""

from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from shoal.core.config import Config, tagged
from shoal.core.functions import bind_arguments, load_function
from shoal.data.chosen import Chosen
from shoal.data.labels import LabelsConfig
from shoal.data.partition.config import CutConfig
from shoal.data.storage.config import StorageConfig
from shoal.data.tiers.config import CacheConfig
from shoal.data.transform.config import StepConfig

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]


class _Loaded(Config):
    validation: Share = 0.05
    """Share of the data held out for validation."""
    test: Share = 0.05
    """Share of the data held out for the final test."""
    order: Literal["full", "window", "time"] = "full"
    """How an epoch is shuffled: full: all samples; window: the samples of some blocks, then of the next ones, so that each block
    is fetched once; time: not at all, the samples as they lie."""
    window: Count | None = None
    """With order = "window": blocks of a window. Five for every sample of a global batch mix well."""
    replay: Share = 0.0
    """Share of an epoch's samples that were met before and come again, evenly between the others; then train.steps
    says the length."""
    replay_last: Count | None = None
    """With replay: draw from so many samples before; from all that were met when left out."""
    replay_from: tuple[Annotated[int, Field(strict=True)] | str, ...] | None = None
    """With replay: draw from these training samples, the first being 0, in the place of the past: numbers and ranges such as
    "100:200". One that is named several times is drawn as much more often."""
    prefetch: Annotated[int, Field(ge=0)] = 2
    """Batches loaded ahead while loading takes over a millisecond; 0 loads each when it is asked for."""
    workers: Annotated[int, Field(ge=0)] = 0
    """Loader processes per rank; 0 loads in the rank itself, which is right unless a sample is costly to make."""

    @model_validator(mode="after")
    def _leave_some_for_training(self) -> Self:
        if self.replay_last is not None and not self.replay:
            raise ValueError("replay_last is for replay, and replay is 0; leave replay_last out")
        if self.replay_from is not None:
            if not self.replay or self.replay_last is not None:
                other = "replay_last says others" if self.replay else "replay is 0"
                raise ValueError(f"replay_from says what replay draws from, and {other}; leave one of them out")
            Chosen(self.replay_from)
        if (self.window is not None) != (self.order == "window"):
            fix = (
                "give data.window, the blocks that are mixed (five for every sample of train.global_batch)"
                if self.window is None
                else "leave window out"
            )
            raise ValueError(f"order is {self.order!r} and window is {self.window}; {fix}")
        if self.validation + self.test >= 1.0:
            raise ValueError(
                f"validation {self.validation:g} + test {self.test:g} leave nothing for training; make their sum less than 1"
            )
        return self


class StdlibConfig(_Loaded):
    """The source code of Python's standard library, as bytes: real text that is on every machine."""

    source: Literal["stdlib"] = "stdlib"
    """Which data this is."""
    sequence: Count = 256
    """Tokens (bytes) per sample."""
    limit_bytes: Count | None = None
    """Use at most this many bytes of it, in whole files; all of it when left out."""


class TextConfig(_Loaded):
    """Files of text, as bytes; every file ends with byte 0."""

    source: Literal["text"] = "text"
    """Which data this is."""
    path: str
    """A folder of files, or one file."""
    pattern: str = "**/*"
    """Which files of the folder are read; names that begin with a dot are not."""
    sequence: Count = 256
    """Tokens (bytes) per sample."""


class TokensConfig(_Loaded):
    """A file of token ids, memory-mapped."""

    source: Literal["tokens"] = "tokens"
    """Which data this is."""
    path: str
    """A one-dimensional whole-number .npy file, or raw little-endian ids in any other file."""
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] = "uint16"
    """Type of raw ids; a .npy file says its own."""
    vocab: Count | None = None
    """Number of token ids; one more than the highest id in the file when left out."""
    sequence: Count = 256
    """Tokens per sample."""


class StoreConfig(_Loaded):
    """A store that ``shoal data build`` made: its rows, or windows over its token ids."""

    source: Literal["store"] = "store"
    """Which data this is."""
    path: str
    """The store's folder or address."""
    version: Count | None = None
    """Which version is read; the newest when the run starts, which its own recipe then names, when left out."""
    split: str | None = None
    """A split that ``shoal data split --save`` kept; the shares ``validation`` and ``test``, in their order, when left out."""
    inputs: tuple[str, ...] | dict[str, tuple[str, ...]] = ()
    """Columns that the model takes, all of numbers but the target when left out; or a table from names of inputs to columns, for
    a model that takes keywords."""
    target: str | None = None
    """The column that is predicted: texts are labels, whole numbers classes or, with ``labels``, ``prepare`` or named inputs,
    labels too; others a regression."""
    targets: tuple[str, ...] = ()
    """Several columns that are predicted together, a regression; instead of ``target``."""
    sequence: Count | None = None
    """Of token ids: tokens per sample."""
    tokens: str | None = None
    """The column of token ids; the only one of whole numbers when left out."""
    vocab: Count | None = None
    """Number of token ids; one more than the highest in the store when left out."""
    storage: StorageConfig = StorageConfig()
    """Deadlines, retries and settings of the storage that it is in."""
    cache: CacheConfig = CacheConfig()
    """What is kept near of a store that is not on this machine."""
    follow: bool = False
    """Take up newer versions where an epoch begins, on all ranks together; what is held out, and what steps and labels were
    fitted to, stays as it was at the start."""
    load: Literal["whole", "blocks", "index"] = "index"
    """whole: everything in memory; blocks: one behind another; index: rows all over the store."""
    prepare: tuple[StepConfig, ...] = ()
    """Steps that are fitted on the training rows, block by block, and applied to rows when they are read."""
    labels: LabelsConfig | None = None
    """The one vocabulary of labels; without it whole numbers of a store without ``prepare`` are classes as they are, from 0."""
    fitted: str | None = None
    """A folder with the fitted steps of a run, which are then not fitted again; a run writes its own here."""
    fitted_digest: str | None = None
    """What the fitted steps must be; a run writes it."""

    @model_validator(mode="after")
    def _say_one_target(self) -> Self:
        if self.target is not None and self.targets:
            raise ValueError("target and targets both say what is predicted; leave one of them out")
        if self.sequence is not None and (self.prepare or self.labels is not None):
            raise ValueError(
                "prepare and labels are for rows, and sequence makes samples of token ids alone; leave one out"
            )
        return self


class SyntheticConfig(_Loaded):
    """Data made from the seed, for tests, proofs and measurements; each kind can be learned."""

    source: Literal["synthetic"] = "synthetic"
    """Which data this is."""
    kind: Literal["tokens", "classes", "regression", "reverse"] = "tokens"
    """tokens: noisy arithmetic sequences; classes: clusters; regression: a smooth function; reverse: pairs of a sequence and its
    reverse, of many lengths."""
    samples: Count = 2048
    """Samples of all splits together."""
    sequence: Annotated[int, Field(ge=2)] = 32
    """Tokens per sample (tokens), or the longest one with its end mark (reverse)."""
    vocab: Annotated[int, Field(ge=4)] = 64
    """Number of token ids (tokens and reverse)."""
    features: tuple[Count, ...] = (16,)
    """Shape of an input (classes and regression)."""
    classes: Annotated[int, Field(ge=2)] = 4
    """Number of classes."""
    outputs: Count = 1
    """Numbers to predict (regression)."""


class DigitsConfig(_Loaded):
    """The 1797 real 8x8 images of handwritten digits that scikit-learn ships."""

    source: Literal["digits"] = "digits"
    """Which data this is."""
    validation: Share = 0.1
    """Share of the data held out for validation."""
    test: Share = 0.1
    """Share of the data held out for the final test."""


class TableConfig(_Loaded):
    """Rows of files: CSV, JSON lines, Parquet and Hive folders, Arrow, WebDataset, images, text, tokens."""

    source: Literal["table"]
    """Which data this is."""
    path: str
    """A file, a folder, a pattern with ``*``, or an address such as s3://bucket/folder."""
    format: Literal["csv", "jsonl", "parquet", "arrow", "webdataset", "mds", "images", "text", "tokens"] | None = None
    """Of the files; by their names when left out."""
    pattern: str | None = None
    """Which files of a folder."""
    where: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Values of ``key=value`` folders; the others are not opened."""
    inputs: tuple[str, ...] | dict[str, tuple[str, ...]] = ()
    """Columns of the model's one input; or a table from names of inputs to columns, for a model that takes keywords."""
    target: str | tuple[str, ...] | None = None
    """What is predicted: texts and whole numbers are labels, other numbers a regression of one or several columns."""
    types: dict[str, str] = Field(default_factory=dict)
    """Types of columns that a look at the first rows gets wrong: bool, int, float, i4, f4, text, time, list:f4."""
    missing: tuple[str, ...] = ("",)
    """Texts of a CSV file that stand for a missing value."""
    delimiter: str | None = None
    """Between fields of a CSV file."""
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] = "uint16"
    """Type of raw token ids."""
    sequence: Count | None = None
    """Token ids of one row."""
    storage: StorageConfig = StorageConfig()
    """Deadlines, retries and settings of the storage that the files are in."""
    cache: CacheConfig = CacheConfig()
    """What is kept near of files that are not on this machine."""
    rejects: str | None = None
    """A file for rows that do not fit; without it the first one is an error."""
    load: Literal["whole"] = "whole"
    """whole: all rows are in memory."""
    cut: CutConfig = CutConfig()
    """How rows are divided into training, validation and test."""
    prepare: tuple[StepConfig, ...] = ()
    """Steps that are fitted on the training rows and applied to all."""
    labels: LabelsConfig = LabelsConfig()
    """The one vocabulary of labels."""
    fitted: str | None = None
    """A folder with the fitted steps of a run, which are then not fitted again; a run writes its own here."""
    fitted_digest: str | None = None
    """What the fitted steps must be; a run writes it."""


class OwnDataConfig(_Loaded):
    """The user's own map-style ``torch.utils.data.Dataset``."""

    build: str
    """package.module:function that returns one dataset, or a dict of datasets with the keys train, validation and test."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the function."""
    collate: str | None = None
    """package.module:function that makes a batch of a list of samples; torch's rule when left out."""
    pad: bool = False
    """Pad samples of many lengths to the longest of their batch; padding counts for nothing."""
    pack: Count | None = None
    """The samples are documents (sequences of token ids): pack them into sequences of so many tokens."""
    shuffle: bool = True
    """Another order in every epoch; false takes the samples as they lie. Iterable datasets have their own order."""
    drop_last: bool = False
    """Leave out the last batch of an epoch where it is short; then train.steps says the length."""
    hold_out: Count | None = None
    """Of an iterable dataset: its first so many samples are held out for validation, and training begins after them."""
    sampler: str | None = None
    """package.module:function that is given the training set and returns a torch Sampler over it, or a weight per sample."""

    @model_validator(mode="after")
    def _say_one_thing(self) -> Self:
        given = [name for name in ("collate", "pad", "pack") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"{given[0]} and {given[1]} both say how samples become a batch; leave one of them out")
        if self.sampler is not None and (self.pack is not None or not self.shuffle):
            other = "pack" if self.pack is not None else "shuffle = false"
            raise ValueError(f"sampler says the order of samples and does not go with {other}; leave one of them out")
        if self.order != "full" and (self.sampler is not None or not self.shuffle):
            other = "sampler" if self.sampler is not None else "shuffle = false"
            raise ValueError(f"order = {self.order!r} and {other} both say the order of samples; leave one of them out")
        return self


AnyDataConfig = (
    StdlibConfig
    | TextConfig
    | TokensConfig
    | StoreConfig
    | SyntheticConfig
    | DigitsConfig
    | TableConfig
    | OwnDataConfig
)
DataConfig = tagged(
    StdlibConfig,
    TextConfig,
    TokensConfig,
    StoreConfig,
    SyntheticConfig,
    DigitsConfig,
    TableConfig,
    OwnDataConfig,
    key="source",
)


def load_collate(config: OwnDataConfig) -> Callable[..., Any] | None:
    """The user's own collate function; None where the recipe names none.

    Raises:
        RequestError: it cannot be imported.
    """
    return None if config.collate is None else load_function(config.collate, key="data.collate")


def load_build(config: OwnDataConfig) -> Callable[[], Any]:
    """The user's function with its arguments bound, ready to be called.

    Raises:
        RequestError: it cannot be imported, or does not take the arguments of the recipe.
    """
    function = load_function(config.build, key="data.build")
    bind_arguments(function, config.args, key=f"data.build = {config.build!r}")
    return lambda: function(**config.args)
