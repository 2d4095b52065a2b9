"""Explains poor learning and lost time of a run, from its records and a probe of its newest checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from systolic.core.errors import SystolicError
from systolic.core.reporter import reporter
from systolic.explaining import learning, speed
from systolic.explaining.cause import Cause
from systolic.runs.job_record import JobRecord
from systolic.runs.record import load_run
from systolic.runs.run import Run


@dataclass(frozen=True, kw_only=True)
class RunExplanation:
    """Problems of a run."""

    path: Path
    causes: Sequence[Cause]
    """Causes of poor learning, then of lost time, each worst first."""
    figures: Mapping[str, Any]
    """``update_ratio``, ``noise_scale``, ``batch``, ``epochs`` and losses; None if unknown."""
    unit: str
    """Unit of ``noise_scale`` and ``batch``."""
    damage: Sequence[str]
    """Records that could not be read."""
    notes: Sequence[str]
    """Checks that were not possible, and why."""
    target: str = ""
    """The run's directory, as it was named."""

    def __repr__(self) -> str:
        """The causes' names on one line."""
        names = ", ".join(cause.name for cause in self.causes) or "no problem found"
        return f"<RunExplanation of {self.path}: {names}>"

    def _repr_html_(self) -> str:
        from systolic.explaining.display.text import lines, run_remarks
        from systolic.report.notebook import WIDTH, screen

        remarks = [*run_remarks(self.figures, self.unit), *self.damage]
        return screen(lines(str(self.path), self.causes, WIDTH, remarks=remarks, notes=self.notes))


def explain_run(
    path: Path,
    *,
    quick: bool = False,
    trust: bool = False,
) -> RunExplanation:
    """Explains a run that has ended or is still training.

    Args:
        path: The run.
        quick: Use its records only; otherwise a run without gradient probes is probed at its newest checkpoint.
        trust: Execute its recipe even if it is another user's.

    Raises:
        NotFoundError: the run does not exist.
        RunError: its records are damaged.
    """
    with Run.open(path) as run:
        notes: list[str] = []
        history = load_run(path)
        if not quick and not history.diagnoses:
            probes, why = probe(run, trust=trust)
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


def probe(run: Run, *, trust: bool = False) -> tuple[list[dict[str, Any]], str]:
    """Measures gradients, updates and noise by layer at the newest checkpoint; returns them, or the reason for none."""
    from systolic.inference.model import set_up_here
    from systolic.inference.setup import with_start
    from systolic.recipes.jobs.run import rebuild
    from systolic.training.probe import examine, too_large

    if not any(run.checkpoints.glob("[0-9]*")):
        return [], "there is no checkpoint to probe"
    try:
        setup = set_up_here(rebuild(run, trust_code=trust).job, run)
        if reason := too_large(setup):
            return [], reason
        reporter().stage("probing the newest checkpoint, layer by layer")
        if setup.steps.network.frozen:
            setup, _ = with_start(setup, run.path, JobRecord.from_json(run.read_job()))
        return list(examine(setup, run)), ""
    except SystolicError as error:
        return [], f"the newest checkpoint could not be probed: {error}"
