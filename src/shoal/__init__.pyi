"""The types of what the package exports; written by docs/make_api.py."""

from shoal.checkpoint.config import CheckpointConfig as CheckpointConfig
from shoal.checkpoint.pretrained import LoadedWeights as LoadedWeights
from shoal.comm.global_batch import all_gather as all_gather
from shoal.core.errors import Refusal as Refusal
from shoal.core.errors import RequestError as RequestError
from shoal.core.errors import RunError as RunError
from shoal.core.errors import ShoalError as ShoalError
from shoal.core.plan import Plan as Plan
from shoal.data.batches.packing import PackedSource as PackedSource
from shoal.data.batches.padding import PadCollate as PadCollate
from shoal.data.options import LoaderOptions as LoaderOptions
from shoal.data.sources.own import from_datasets as from_datasets
from shoal.engine.callbacks.ema import EMA as EMA
from shoal.engine.callbacks.monitor import BestCheckpoint as BestCheckpoint
from shoal.engine.callbacks.monitor import EarlyStopping as EarlyStopping
from shoal.engine.callbacks.ratefinder import RateCurve as RateCurve
from shoal.engine.config import TrainConfig as TrainConfig
from shoal.engine.evaluate import Evaluation as Evaluation
from shoal.engine.hooks import Hook as Hook
from shoal.engine.hooks import StepResult as StepResult
from shoal.engine.metrics import GatheredMetric as GatheredMetric
from shoal.engine.metrics import Metric as Metric
from shoal.engine.objective import StepFunction as StepFunction
from shoal.engine.weights import load_weights as load_weights
from shoal.library.loader import RunLoader as RunLoader
from shoal.library.rates import find_rate as find_rate
from shoal.library.run import Run as Run
from shoal.optim.config import OptimConfig as OptimConfig
from shoal.parallel.analysis.structure import ParallelConfig as ParallelConfig
from shoal.pipeline.config import PipelineConfig as PipelineConfig
from shoal.telemetry.config import LogConfig as LogConfig
from shoal.telemetry.config import TelemetryConfig as TelemetryConfig
from shoal.telemetry.loggers import Logger as Logger
from shoal.trainer.build import LoadedRun as LoadedRun
from shoal.trainer.build import load_run as load_run
from shoal.trainer.config import ElasticConfig as ElasticConfig
from shoal.trainer.config import EvalConfig as EvalConfig
from shoal.trainer.config import Recipe as Recipe
from shoal.trainer.config import load_recipe as load_recipe
from shoal.trainer.loop import Trainer as Trainer
from shoal.tuning.planning import Answer as Answer
from shoal.tuning.planning import plan as plan
from shoal.tuning.simulation import Simulation as Simulation
from shoal.tuning.simulation import simulate as simulate
from shoal.tuning.simulation_request import SimulationOptions as SimulationOptions
from shoal.verify.certificate import Certificate as Certificate
from shoal.verify.certificate import MutantResult as MutantResult
from shoal.verify.result import PlanResult as PlanResult
from shoal.verify.session import verify as verify

__all__ = [
    "Answer",
    "BestCheckpoint",
    "Certificate",
    "CheckpointConfig",
    "EMA",
    "EarlyStopping",
    "ElasticConfig",
    "EvalConfig",
    "Evaluation",
    "GatheredMetric",
    "Hook",
    "LoadedRun",
    "LoadedWeights",
    "LoaderOptions",
    "LogConfig",
    "Logger",
    "Metric",
    "MutantResult",
    "OptimConfig",
    "PackedSource",
    "PadCollate",
    "ParallelConfig",
    "PipelineConfig",
    "Plan",
    "PlanResult",
    "RateCurve",
    "Recipe",
    "Refusal",
    "RequestError",
    "Run",
    "RunError",
    "RunLoader",
    "ShoalError",
    "Simulation",
    "SimulationOptions",
    "StepFunction",
    "StepResult",
    "TelemetryConfig",
    "TrainConfig",
    "Trainer",
    "all_gather",
    "find_rate",
    "from_datasets",
    "load_recipe",
    "load_run",
    "load_weights",
    "plan",
    "simulate",
    "verify",
]
