from collections.abc import Iterator
from pathlib import Path

import jax
import jax.monitoring
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import systolic
from systolic.compiling.program_store import ProgramStore
from systolic.inference.predictor import FixedForm, Predictor
from systolic.inference.rows import Bucket, Row
from systolic.serving.batch.buckets import InputLimits
from systolic.serving.batch.model import intake_of
from systolic.serving.facts import COMPILED
from tests.formats import test_sentences

pytestmark = pytest.mark.own_programs


@pytest.fixture(autouse=True)
def without_caches_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Programs that JAX's own cache has are not kept: here it is empty."""
    monkeypatch.setenv("SYSTOLIC_CACHE", str(tmp_path / "home"))
    before = jax.config.jax_compilation_cache_dir
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


BUCKETS = (Bucket(length=8, rows=1), Bucket(length=8, rows=4))


def test_a_second_model_of_new_weights_neither_traces_nor_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_sentences.folder(tmp_path / "tiny")
    model = systolic.open(tmp_path / "tiny")
    steps, rest = model.setup.steps, model.weights.model_state
    rows = [Row(arrays={"tokens": np.arange(1, 6, dtype=np.int32)}, length=5)]
    lines: list[str] = []

    def opened(params: dict[str, jax.Array]) -> Predictor:
        store = ProgramStore(steps, lines.append, root=tmp_path / "cache")
        intake = intake_of(steps, params, rest, InputLimits(), store)
        run = Predictor(intake.form, params, rest, store)
        assert sorted(run.outputs(BUCKETS[0])) == ["embedding"]
        return run

    one = model.weights.params
    other = {path: 1.5 * array for path, array in one.items()}
    first = opened(one)
    assert not any(made.cached for b in BUCKETS if (made := first.compile(b)) is not None)
    expected = Predictor(first.form, other, rest)(rows, BUCKETS[1])

    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **more: compiled.append(event) if event == COMPILED else None
    )

    def traced(params: object, model_state: object, batch: object) -> None:
        pytest.fail("the program was traced")

    monkeypatch.setattr(FixedForm, "function", lambda self: traced)
    second = opened(other)
    assert all(made.cached for b in BUCKETS if (made := second.compile(b)) is not None)
    assert not compiled
    assert not lines
    for got, wanted in zip(second(rows, BUCKETS[1]), expected, strict=True):
        np.testing.assert_array_equal(got["embedding"], wanted["embedding"])
