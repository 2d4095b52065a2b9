"""Results of a training session: its summary, a sample, the next command."""

import shlex
from pathlib import Path
from typing import Any

from systolic.core.errors import SystolicError
from systolic.data.text.chat import Messages
from systolic.data.text.instructions import Instructions
from systolic.inference.generation import Generator
from systolic.job import Job, Sampling
from systolic.runs.remote.store import origin
from systolic.setup import Setup
from systolic.steps.step_functions import StepFunctions
from systolic.training.checkpointing import TrainingProgress
from systolic.training.ledger import Ledger, Meter

SAMPLE_TOKENS = 200
LONGEST_QUESTION = 60
"""Characters of a question that the next command asks."""


def summarise(
    *,
    setup: Setup,
    run: Path,
    progress: TrainingProgress,
    metrics: dict[str, float],
    meter: Meter,
    ledger: Ledger,
    checkpoint: str | None,
) -> dict[str, Any]:
    """Figures of a session under their published names.

    ``time`` adds up to ``seconds``, the wall time since the command started; ``goodput`` is the
    share of it in which steps were computed; throughput counts the loop without compiles,
    evaluations and saves. ``forecast`` has the step time of the plan's forecast and the measured
    one; it is empty for a run without a plan.
    """
    throughput, mfu = meter.overall()
    expected = setup.expected
    time = ledger.close()
    seconds = sum(time.values())
    return {
        "run": str(run),
        "steps": progress.step,
        "final": {"loss": progress.last.get("loss"), "metrics": metrics},
        f"{setup.unit}_per_second": throughput,
        "mfu": mfu,
        "goodput": time["step"] / max(seconds, 1e-9),
        "forecast": {} if expected is None else expected.against(meter.step_seconds()),
        "checkpoint": checkpoint,
        "seconds": seconds,
        "time": time,
        "bad_steps": progress.bad_steps,
    }


def next_command(job: Job, run: Path, *, unfinished: bool) -> str:
    """Command to type after this session."""
    folder = origin(run)
    where = shlex.quote(str(run) if folder is None else folder.url)
    if unfinished:
        return f"systolic train --resume {where}"
    if isinstance(job.data, Instructions):
        return f"systolic generate {where} --chat {shlex.quote(_question(job.data))}"
    if job.sample is not None:
        prompt = f" {shlex.quote(job.sample)}" if job.sample else ""
        return f"systolic generate {where}{prompt}"
    return f"systolic eval {where}"


def _question(data: Instructions) -> str:
    """A short question of the held-out conversations, to ask the model; an ellipsis where there is none."""
    try:
        question = said(data.question() or "")
    except SystolicError:  # the data was moved meanwhile
        question = ""
    short = len(question) <= LONGEST_QUESTION and "\n" not in question
    return question if question and short else "…"


def sample_prompt(job: Job) -> str | Messages | None:
    """Prompt of a job's samples: ``job.sample``, for conversations as a message, and the first held-out conversation in place of an empty one; ``None`` for no sample."""
    if job.sample is None or not isinstance(job.data, Instructions):
        return job.sample
    return [{"role": "user", "content": job.sample}] if job.sample else job.data.question()


def said(prompt: str | Messages) -> str:
    """A prompt as text: of messages the last."""
    return prompt if isinstance(prompt, str) else str(prompt[-1].get("content") or "")


def sample(steps: StepFunctions, params: Any, model_state: Any, prompt: str | Messages) -> str:
    """Text that a language model generates after ``prompt``; its likeliest answer to messages."""
    sampling = Sampling() if isinstance(prompt, str) else Sampling(temperature=0.0)
    generator = Generator(steps, params, model_state, sampling)
    return "".join(generator.stream(prompt, tokens=SAMPLE_TOKENS, seed=steps.job.seed))
