"""``systolic.explain``: a job, a run, a profile or a saved forecast in, frozen values out."""

import html
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import systolic
from systolic import recipes
from systolic.chips import slice
from systolic.compiling import StepKind
from systolic.core.errors import NotFoundError, OptionError
from systolic.core.reporter import reporting, working
from systolic.explaining.display.progress import ExplainReporter
from systolic.explaining.display.view import show
from systolic.explaining.explainer import ExplainProgress, ExplainStage, RecipeStep, StepExplainer
from tests.planning import fabricated
from tests.planning.evaluators import AnsweringEvaluator

TINY = f"{Path(__file__).parents[1] / 'cli' / 'tiny.py'}:job"


def test_a_step_is_explained_with_what_changes_gain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SYSTOLIC_CACHE", str(tmp_path))  # nothing is compiled yet
    seen: list[ExplainProgress] = []
    said: list[str] = []

    class Seeing(ExplainReporter):
        def stage(self, text: str) -> None:
            said.append(text)
            assert not seen  # before the causes
            super().stage(text)

        def update(self, state: Any) -> None:
            seen.append(state)
            super().update(state)

    evaluator = AnsweringEvaluator(
        lambda job, one, full: fabricated.tried(one, 1e-6 * one.layout.accumulate, 1.0).forecast
    )
    of = RecipeStep(recipe=recipes.find(TINY), options={}, on=slice("v5e-4"), flags=())
    explainer = replace(of.explainer(), remedies=3, evaluator=evaluator)
    with reporting(Seeing()), working("tiny"):
        made = explainer.explain()
    assert show(made) == 0
    assert said
    shown = capsys.readouterr().out
    assert made.forecast.fits
    assert made.forecast.step_seconds
    assert made.causes
    shares = [cause.share or 0.0 for cause in made.causes]
    assert shares == sorted(shares, reverse=True)
    assert [one.candidate for one in made.remedies if "together" not in one.text]
    assert made.best is not None
    assert made.best.same_result
    assert made.best.gain == max(one.gain or 0.0 for one in made.remedies if one.same_result)
    stages = list(dict.fromkeys(one.stage for one in seen))
    assert stages == [
        ExplainStage.explained,
        ExplainStage.changing,
        ExplainStage.combining,
        ExplainStage.training,
    ]
    told = [one.remedy for one in seen if one.remedy is not None]
    assert sorted(told, key=lambda one: one.text) == sorted(made.remedies, key=lambda one: one.text)
    page = html.unescape(re.sub(r"<[^>]+>", "", made._repr_html_()))
    assert made.causes[0].title in page
    assert made.causes[0].title in shown
    for one in told:
        changes = "" if one.same_result else "  [changes training]"
        assert f"  {one.verdict:<59}  {one.text}{changes}" in shown.splitlines()
    after = shown.partition("the best that keeps training the same: ")[2].splitlines()
    assert after[0].startswith(f"{made.best.text}, {made.best.verdict}, now ")
    assert shlex.split(after[1])[:3] == ["systolic", "forecast", TINY]
    settings = made.best.candidate.settings(made.job)
    assert f"--layout.fsdp {settings['layout.fsdp']}" in after[1]
    assert f"the best that keeps training the same: {made.best.text}" in " ".join(page.split())
    assert made.best.text in repr(made)
    assert len(repr(made)) < 600


def test_the_name_of_a_recipe_is_explained_with_its_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[StepExplainer] = []
    monkeypatch.setattr(StepExplainer, "explain", lambda one: asked.append(one))
    systolic.explain("lm", on="v5e-4", step="eval", **{"model.layers": 3})
    systolic.explain("llama-3.1-8b", on="v5e-16", steps=7)
    systolic.explain(recipes.find(TINY)({}), on="v5e-4", steps=5)
    systolic.explain(TINY, on="v5e-4")
    layers, steps = asked[0].job.model.layers, [one.job.steps for one in asked[1:3]]
    assert (layers, asked[0].step, steps) == (3, StepKind.eval, [7, 5])
    assert asked[3].job.name == asked[2].job.name


@pytest.mark.parametrize(
    ("target", "options", "error", "said"),
    [
        (None, {}, OptionError, "explaining a job needs a slice; give on='v5e-16'"),
        (None, {"on": "cpu"}, OptionError, "cpu is a CPU, and a schedule to explain"),
        (
            None,
            {"on": "v5e-4", "remedies": -1},
            OptionError,
            "remedies is -1; it must be at least 0",
        ),
        ("lm", {}, OptionError, "explaining a job needs a slice; give on='v5e-16'"),
        ("lm", {"on": "v5e-4", "layers": 2}, OptionError, "lm has no option 'layers'"),
        ("nowhere", {"on": "v5e-4"}, NotFoundError, "there is no recipe or model 'nowhere'"),
        ("nowhere.json", {}, NotFoundError, "there is no file nowhere.json; check the path"),
        ("nowhere", {}, NotFoundError, "nowhere is no run, profile, forecast, recipe or model"),
        (
            3,
            {},
            OptionError,
            "target is 3; it takes a Job, the name of a recipe or a model, or a path",
        ),
        (
            None,
            {"on": "v5e-4", "step": "tran"},
            OptionError,
            "step is 'tran'; did you mean train?",
        ),
    ],
)
def test_mistakes(target: Any, options: dict[str, Any], error: Any, said: str) -> None:
    with pytest.raises(error, match=re.escape(said)):
        systolic.explain(target or fabricated.facts().job, **options)
