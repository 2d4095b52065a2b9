"""What keeps a run from learning and what took its time, by its records and a probe of its newest checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from systolic.artifact.record import load_run
from systolic.artifact.run import Run
from systolic.core.errors import SystolicError
from systolic.explaining import learning, speed
from systolic.explaining.cause import Cause
from systolic.session.explaining import ExplainProgress, ExplainStage, ExplainWatch


@dataclass(frozen=True, kw_only=True)
class RunExplanation:
    """What holds a run back."""

    path: Path
    causes: Sequence[Cause]
    """Of poor learning, then of lost time, each worst first."""
    figures: Mapping[str, Any]
    """``update_ratio``, ``noise_scale``, ``batch``, ``epochs`` and losses; None for what is not known."""
    unit: str
    """What ``noise_scale`` and ``batch`` count."""
    damage: Sequence[str]
    """Records that could not be read."""
    notes: Sequence[str]
    """What could not be judged, and why."""


def explain_run(
    path: Path,
    *,
    quick: bool = False,
    trust: bool = False,
    watch: ExplainWatch = lambda _: None,
) -> RunExplanation:
    """Explains a run that has ended or still trains.

    Args:
        path: Of the run.
        quick: Judge by its records only; else one without gradient probes is probed at its newest checkpoint.
        trust: Execute its recipe although it is another user's.
        watch: Is given the progress.

    Raises:
        NotFoundError: there is no run.
        RunError: its records are damaged.
    """
    with Run.open(path) as run:
        notes: list[str] = []
        history = load_run(path)
        if not quick and not history.diagnoses:
            probes, why = probe(run, trust=trust, watch=watch)
            history = replace(history, diagnoses=probes)
            notes += [why] if why else []
    session = load_run(path, last_session=True)
    return RunExplanation(
        path=path,
        causes=[*learning.learning(history), *speed.speed(session)],
        figures=learning.vitals(history),
        unit=history.unit,
        damage=history.damage,
        notes=[*notes, *learning.unknown(history, probed=not quick)],
    )


def probe(
    run: Run, *, trust: bool = False, watch: ExplainWatch = lambda _: None
) -> tuple[list[dict[str, Any]], str]:
    """Gradients, updates and noise by layer at the newest checkpoint, or why there are none."""
    from systolic.session.run_files import rebuild
    from systolic.session.trained import set_up_here
    from systolic.training.probe import examine, too_large

    if not any(run.checkpoints.glob("[0-9]*")):
        return [], "there is no checkpoint to probe"
    try:
        setup = set_up_here(rebuild(run, trust_code=trust).job, run)
        if reason := too_large(setup):
            return [], reason
        text = "probing the newest checkpoint, layer by layer"
        watch(ExplainProgress(stage=ExplainStage.compiling, text=text))
        return list(examine(setup, run)), ""
    except SystolicError as error:
        return [], f"its checkpoint could not be probed: {error}"
