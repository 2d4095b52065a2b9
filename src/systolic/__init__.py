"""Systolic takes a model to a TPU and knows the step time, the memory and the bill beforehand.

Importing this package imports no array library, touches no environment variable and starts nothing.
"""

import time
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from systolic.chips import Chip, Slice, chip, chips, slice
    from systolic.comparing.command import compare_models
    from systolic.comparing.comparison import Comparison
    from systolic.core.errors import SystolicError
    from systolic.explaining.command import calibrate, calibrations, explain
    from systolic.forecasting import Forecast, Spread
    from systolic.forecasting.command import forecast
    from systolic.forecasting.table import ForecastTable
    from systolic.formats.command import export, import_model
    from systolic.formats.export import Exported
    from systolic.formats.importing import Imported
    from systolic.inference.command import evaluate, generate, predict, verify_bundle
    from systolic.inference.evaluation import AnswerOptions
    from systolic.inference.model import TrainedModel
    from systolic.inference.model import open_model as open
    from systolic.inference.results import GeneratedTexts, MeasuredModel, Predictions
    from systolic.inference.verification import Verified
    from systolic.job import MatrixFormat, Sampling, WeightFormat
    from systolic.launching.command import launch, launch_server, launches, logs, status, stop
    from systolic.planning.command import plan
    from systolic.planning.serving import ServingPlan, plan_serving
    from systolic.quantizing.command import quantize_model
    from systolic.quantizing.quantize import QuantizedModel
    from systolic.serving.command import batch, serve
    from systolic.training.command import rehearse, replay, resume, train
    from systolic.training.session import TrainResult
    from systolic.tuning.command import tune
    from systolic.tuning.results import StudyResult

__version__ = "0.1.0"
IMPORTED = time.time()
"""Seconds since 1970 at the first import of the package: a file of it that changed later may not be what runs."""

_HOME = {
    "AnswerOptions": "systolic.inference.evaluation",
    "Chip": "systolic.chips",
    "Comparison": "systolic.comparing.comparison",
    "Exported": "systolic.formats.export",
    "Forecast": "systolic.forecasting",
    "ForecastTable": "systolic.forecasting.table",
    "GeneratedTexts": "systolic.inference.results",
    "Imported": "systolic.formats.importing",
    "MatrixFormat": "systolic.job",
    "MeasuredModel": "systolic.inference.results",
    "Predictions": "systolic.inference.results",
    "QuantizedModel": "systolic.quantizing.quantize",
    "Sampling": "systolic.job",
    "Slice": "systolic.chips",
    "Spread": "systolic.forecasting",
    "StudyResult": "systolic.tuning.results",
    "SystolicError": "systolic.core.errors",
    "TrainResult": "systolic.training.session",
    "TrainedModel": "systolic.inference.model",
    "Verified": "systolic.inference.verification",
    "WeightFormat": "systolic.job",
    "batch": "systolic.serving.command",
    "calibrate": "systolic.explaining.command",
    "calibrations": "systolic.explaining.command",
    "chip": "systolic.chips",
    "chips": "systolic.chips",
    "compare_models": "systolic.comparing.command",
    "evaluate": "systolic.inference.command",
    "explain": "systolic.explaining.command",
    "export": "systolic.formats.command",
    "forecast": "systolic.forecasting.command",
    "generate": "systolic.inference.command",
    "import_model": "systolic.formats.command",
    "launch": "systolic.launching.command",
    "launch_server": "systolic.launching.command",
    "launches": "systolic.launching.command",
    "logs": "systolic.launching.command",
    "open": "systolic.inference.model",
    "plan": "systolic.planning.command",
    "plan_serving": "systolic.planning.serving",
    "predict": "systolic.inference.command",
    "ServingPlan": "systolic.planning.serving",
    "quantize_model": "systolic.quantizing.command",
    "rehearse": "systolic.training.command",
    "replay": "systolic.training.command",
    "resume": "systolic.training.command",
    "serve": "systolic.serving.command",
    "slice": "systolic.chips",
    "status": "systolic.launching.command",
    "stop": "systolic.launching.command",
    "train": "systolic.training.command",
    "tune": "systolic.tuning.command",
    "verify_bundle": "systolic.inference.command",
}

_NAMES = {"open": "open_model"}
"""Public names that have another one where they are defined."""

__all__ = [
    "AnswerOptions",
    "Chip",
    "Comparison",
    "Exported",
    "Forecast",
    "ForecastTable",
    "GeneratedTexts",
    "Imported",
    "MatrixFormat",
    "MeasuredModel",
    "Predictions",
    "QuantizedModel",
    "Sampling",
    "ServingPlan",
    "Slice",
    "Spread",
    "StudyResult",
    "SystolicError",
    "TrainResult",
    "TrainedModel",
    "Verified",
    "WeightFormat",
    "__version__",
    "batch",
    "calibrate",
    "calibrations",
    "chip",
    "chips",
    "compare_models",
    "evaluate",
    "explain",
    "export",
    "forecast",
    "generate",
    "import_model",
    "launch",
    "launch_server",
    "launches",
    "logs",
    "open",
    "plan",
    "plan_serving",
    "predict",
    "quantize_model",
    "rehearse",
    "replay",
    "resume",
    "serve",
    "slice",
    "status",
    "stop",
    "train",
    "tune",
    "verify_bundle",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), _NAMES.get(name, name))
    raise AttributeError(f"module 'systolic' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
