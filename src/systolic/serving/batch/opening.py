"""A batch model of whatever a job's model is."""

from typing import Any

from systolic.compiling.program_store import ProgramStore
from systolic.core.errors import OptionError
from systolic.data.audio.recordings import Recordings
from systolic.data.text.sentences import Sentences
from systolic.inference.predictor import FixedForm, Predictor
from systolic.inference.readers import SpeechReader, TextReader
from systolic.job.data import Data
from systolic.models.encoder.config import Encoder
from systolic.serving.batch.buckets import Recorder
from systolic.serving.batch.facts import BatchWatcher
from systolic.serving.batch.intake import Intake
from systolic.serving.batch.media import ImageIntake, SpeechIntake, TextIntake
from systolic.serving.batch.model import DynamicBatches
from systolic.serving.batch.options import BatchOptions, InputLimits
from systolic.serving.batch.tensors import ArrayIntake, used_inputs
from systolic.steps.steps import StepFunctions


def batch_model(
    name: str,
    steps: StepFunctions,
    params: Any,
    model_state: Any,
    options: BatchOptions | None = None,
    watcher: BatchWatcher | None = None,
    store: ProgramStore | None = None,
    recorder: Recorder | None = None,
) -> DynamicBatches:
    """The model of a job with its weights on the job's mesh; nothing is compiled before its ``start``.

    Args:
        name: For messages.
        steps: Programs of the job.
        params: Weights.
        model_state: Other variables.
        options: Batches, queue and limits.
        watcher: Told of compiles, batches and answers.
        store: Where programs are kept; None compiles all.
        recorder: Of traffic; by default one of its own.

    Raises:
        OptionError: the job's program takes nothing that a request could hold.
    """
    options = options or BatchOptions()
    intake = intake_of(steps, params, model_state, options.limits, store)
    run = Predictor(intake.form, params, model_state, store)
    return DynamicBatches(name, intake, run, options, watcher, recorder)


def intake_of(
    steps: StepFunctions,
    params: Any,
    model_state: Any,
    limits: InputLimits,
    store: ProgramStore | None = None,
) -> Intake:
    """Intake of requests for a job's model.

    Raises:
        OptionError: its program takes nothing.
    """
    data, model = steps.job.data, steps.job.model
    if isinstance(data, Sentences) and isinstance(model, Encoder):
        return TextIntake(TextReader(steps, data), model.vocab, limits)
    if isinstance(data, Recordings):
        return SpeechIntake(SpeechReader(steps), limits)
    form = FixedForm(steps)
    used = used_inputs(form, params, model_state, store)
    if used == ["image"] and type(data).read is not Data.read:
        return ImageIntake(form, limits)
    if not used:
        raise OptionError(f"{steps.job.name} predicts without inputs; there is nothing to ask it")
    return ArrayIntake(form, used, limits)
