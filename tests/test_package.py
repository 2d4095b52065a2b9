"""The public surface, and that importing it does nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import systolic

HEAVY = ("jax", "jaxlib", "numpy", "flax", "optax", "orbax", "grain", "rich", "tyro", "msgspec")


def test_public_names() -> None:
    assert systolic.__all__ == [
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
    for name in systolic.__all__:
        assert getattr(systolic, name) is not None
    assert dir(systolic) == sorted(systolic.__all__)


def test_chips_is_a_function_after_the_import_of_its_package() -> None:
    import systolic.chips.record

    assert systolic.chips() == systolic.chips.chips()
    assert systolic.chips()[0].name == "v2"


@pytest.mark.parametrize("name", ["Job", "Layout", "numpy", "nonsense"])
def test_other_names_are_not_there(name: str) -> None:
    with pytest.raises(AttributeError, match=f"no attribute '{name}'"):
        getattr(systolic, name)


def _in_a_fresh_process(statement: str) -> dict[str, list[str]]:
    """Modules that a statement loads and variables that it changes."""
    script = f"""
import json, os, sys
before, variables = set(sys.modules), dict(os.environ)
{statement}
print(json.dumps({{
    "modules": sorted(set(sys.modules) - before),
    "variables": sorted(k for k in {{*os.environ, *variables}} if os.environ.get(k) != variables.get(k)),
}}))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_importing_the_package_loads_nothing_heavy() -> None:
    changes = _in_a_fresh_process("import systolic")
    assert not {name.split(".")[0] for name in changes["modules"]} & set(HEAVY)
    assert changes["variables"] == []


def test_a_slice_needs_no_array_library() -> None:
    changes = _in_a_fresh_process("import systolic; assert systolic.slice('v5e-16').num_hosts == 4")
    loaded = {name.split(".")[0] for name in changes["modules"]}
    assert not loaded & {"jax", "jaxlib", "flax", "optax", "orbax", "grain"}


def test_recipes_and_their_jobs_need_no_array_library() -> None:
    changes = _in_a_fresh_process(
        "from systolic import recipes; [recipes.find(name) for name in recipes.shipped()];"
        " recipes.find('bytes')({}).to_json()"
    )
    loaded = {name.split(".")[0] for name in changes["modules"]}
    assert not loaded & {"jax", "jaxlib", "flax", "optax", "orbax", "grain", "PIL", "pyarrow"}


def test_the_version_is_the_projects() -> None:
    text = Path(__file__).parents[1].joinpath("pyproject.toml").read_text()
    assert f'version = "{systolic.__version__}"' in text
