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
    from systolic.forecasting import Forecast, Spread
    from systolic.forecasting.table import ForecastTable
    from systolic.formats.export import Exported
    from systolic.formats.registry import ExportSettings, LiteQuantization
    from systolic.inference.command import evaluate, generate, predict, verify_bundle
    from systolic.inference.model import TrainedModel
    from systolic.inference.model import open_model as open
    from systolic.inference.results import GeneratedTexts, MeasuredModel, Predictions
    from systolic.inference.scoring import AnswerOptions
    from systolic.inference.verification import Verified
    from systolic.job import MatrixFormat, Sampling, WeightFormat
    from systolic.planning.command import plan
    from systolic.planning.serving import ServingPlan
    from systolic.session.explaining import explain
    from systolic.session.exporting import export_model, export_program
    from systolic.session.forecast import forecast
    from systolic.session.importing import Imported, import_model
    from systolic.session.public_tuning import tune
    from systolic.session.quantizing import Evaluated, QuantizedModel, quantize_model
    from systolic.session.serving_plan import plan_serving
    from systolic.session.train_command import resume, train
    from systolic.session.training import TrainResult
    from systolic.tuning.results import StudyResult

__version__ = "0.1.0"
IMPORTED = time.time()
"""Seconds since 1970 at the first import of the package: a file of it that changed later may not be what runs."""

_HOME = {
    "AnswerOptions": "systolic.inference.scoring",
    "Chip": "systolic.chips",
    "Comparison": "systolic.comparing.comparison",
    "Evaluated": "systolic.session.quantizing",
    "ExportSettings": "systolic.formats.registry",
    "Exported": "systolic.formats.export",
    "Forecast": "systolic.forecasting",
    "ForecastTable": "systolic.forecasting.table",
    "GeneratedTexts": "systolic.inference.results",
    "Imported": "systolic.session.importing",
    "LiteQuantization": "systolic.formats.registry",
    "Predictions": "systolic.inference.results",
    "MatrixFormat": "systolic.job",
    "MeasuredModel": "systolic.inference.results",
    "QuantizedModel": "systolic.session.quantizing",
    "Sampling": "systolic.job",
    "Slice": "systolic.chips",
    "Spread": "systolic.forecasting",
    "StudyResult": "systolic.tuning.results",
    "SystolicError": "systolic.core.errors",
    "TrainResult": "systolic.session.training",
    "TrainedModel": "systolic.inference.model",
    "Verified": "systolic.inference.verification",
    "WeightFormat": "systolic.job",
    "chip": "systolic.chips",
    "chips": "systolic.chips",
    "compare_models": "systolic.comparing.command",
    "evaluate": "systolic.inference.command",
    "explain": "systolic.session.explaining",
    "export_model": "systolic.session.exporting",
    "export_program": "systolic.session.exporting",
    "forecast": "systolic.session.forecast",
    "generate": "systolic.inference.command",
    "import_model": "systolic.session.importing",
    "open": "systolic.inference.model",
    "plan": "systolic.planning.command",
    "plan_serving": "systolic.session.serving_plan",
    "predict": "systolic.inference.command",
    "ServingPlan": "systolic.planning.serving",
    "quantize_model": "systolic.session.quantizing",
    "resume": "systolic.session.train_command",
    "slice": "systolic.chips",
    "train": "systolic.session.train_command",
    "tune": "systolic.session.public_tuning",
    "verify_bundle": "systolic.inference.command",
}

_NAMES = {"open": "open_model"}
"""Public names that have another one where they are defined."""

__all__ = [
    "AnswerOptions",
    "Chip",
    "Comparison",
    "Evaluated",
    "ExportSettings",
    "Exported",
    "Forecast",
    "ForecastTable",
    "GeneratedTexts",
    "Imported",
    "LiteQuantization",
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
    "chip",
    "chips",
    "compare_models",
    "evaluate",
    "explain",
    "export_model",
    "export_program",
    "forecast",
    "generate",
    "import_model",
    "open",
    "plan",
    "plan_serving",
    "predict",
    "quantize_model",
    "resume",
    "slice",
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
