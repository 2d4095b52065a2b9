"""Job and layout: what to compute and how to shard it, as plain frozen values that import without jax.

A recipe is a function that returns a :class:`Job`. Its model, task and data are values that *can
build* the real thing (a Flax module, a loss, a stream of batches); nothing is built here.
"""

from systolic.job.adapter import Adapter, AdapterKind
from systolic.job.data import Data, Field, FileReading, OnError, Read, Split
from systolic.job.fewer import Fewer, on_fewer
from systolic.job.job import Batch, Checkpoints, Evaluation, Guard, GuardRule, Job, Mode
from systolic.job.layout import (
    AttentionBackward,
    Axis,
    ContextOrder,
    Layout,
    Placement,
    Remat,
    Residual,
)
from systolic.job.model import (
    IncrementalDecoder,
    Model,
    ModelStats,
    Target,
    Task,
    TokenScorer,
)
from systolic.job.optimizer import (
    ChangedOptimizer,
    Optimizer,
    OptimizerChange,
    OptimizerKind,
    Schedule,
    ScheduleKind,
)
from systolic.job.precision import (
    Dtypes,
    ExpertAxis,
    LayerArrays,
    Precision,
    RoundedBackward,
    Rounding,
    Served,
    ServedCache,
    ServedWeights,
    Stored,
)
from systolic.job.quantization import GROUP, MatrixFormat, Quantization, WeightFormat
from systolic.job.sampling import Sampling

__all__ = [
    "GROUP",
    "Adapter",
    "AdapterKind",
    "AttentionBackward",
    "Axis",
    "Batch",
    "ChangedOptimizer",
    "Checkpoints",
    "ContextOrder",
    "Data",
    "Dtypes",
    "Evaluation",
    "ExpertAxis",
    "Fewer",
    "Field",
    "FileReading",
    "Guard",
    "GuardRule",
    "IncrementalDecoder",
    "Job",
    "LayerArrays",
    "Layout",
    "MatrixFormat",
    "Mode",
    "Model",
    "ModelStats",
    "OnError",
    "Optimizer",
    "OptimizerChange",
    "OptimizerKind",
    "Placement",
    "Precision",
    "Quantization",
    "Read",
    "Remat",
    "Residual",
    "RoundedBackward",
    "Rounding",
    "Sampling",
    "Schedule",
    "ScheduleKind",
    "Served",
    "ServedCache",
    "ServedWeights",
    "Split",
    "Stored",
    "Target",
    "Task",
    "TokenScorer",
    "WeightFormat",
    "on_fewer",
]
