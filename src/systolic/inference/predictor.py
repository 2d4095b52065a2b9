"""A model's program over rows: one executable for each bucket."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from systolic.compiling.program_store import ProgramSpec, ProgramStore, ReadyProgram, made_ready
from systolic.core.digest import digest
from systolic.inference.forms import Arrays, Form
from systolic.inference.rows import Bucket, Row
from systolic.steps.constant_folding import FoldedProgram


class Predictor:
    """Weights with the programs that turn rows into outputs.

    Args:
        form: How rows make a batch.
        params: Weights.
        model_state: Other variables.
        store: Where programs are kept; None compiles all.
    """

    def __init__(
        self, form: Form, params: Arrays, model_state: Arrays, store: ProgramStore | None = None
    ) -> None:
        self.form, self._store = form, store
        self._weights = (params, model_state)
        target = form.steps.target
        self._options = target.compiler_options
        self._jitted = jax.jit(form.function(), compiler_options=self._options)
        self._folds = target.platform == "cpu" and target.mesh.size == 1
        self._constants: dict[str, list[jax.Array]] = {}
        self._described: dict[Bucket, tuple[str, list[Any]]] = {}
        self._compiled: dict[Bucket, Callable[[Arrays], Any]] = {}

    def compile(self, bucket: Bucket) -> ReadyProgram | None:
        """Makes the program of a bucket ready, from the store or compiled; None where it was made before."""
        if bucket in self._compiled:
            return None
        given: Any = self._weights
        folded = self._folded(bucket)
        if self._folds:
            given = (self._shared(bucket, folded),)
        spec = self.spec(bucket)

        def lower() -> Any:
            if self._folds:
                jitted = jax.jit(folded(), compiler_options=self._options)
                return jitted.lower(*spec.arguments)
            return self._jitted.lower(*spec.arguments)

        made = made_ready(self._store, spec, lower)
        self._compiled[bucket] = partial(made.compiled, *given)
        return made

    def spec(self, bucket: Bucket) -> ProgramSpec:
        """What the program of a bucket is asked for in the store."""
        plain = self._plain(f"predict {bucket}", bucket)
        if not self._folds:
            return plain
        key, shapes = self._constants_of(bucket)
        sizes = {**plain.sizes, "constants": key}
        return replace(plain, sizes=sizes, arguments=(shapes, plain.arguments[-1]))

    def _plain(self, name: str, bucket: Bucket) -> ProgramSpec:
        """A program of a bucket over all weights."""
        sizes = {"form": type(self.form).__name__}
        arguments = (*self._weights, self.form.abstract(bucket))
        return ProgramSpec(name=name, sizes=sizes, arguments=arguments)

    def _folded(self, bucket: Bucket) -> Callable[[], FoldedProgram]:
        """What traces the folded program of a bucket, once."""
        return cache(
            lambda: FoldedProgram(self.form.function(), self._weights, self.form.abstract(bucket))
        )

    def _constants_of(
        self, bucket: Bucket, folded: Callable[[], FoldedProgram] | None = None
    ) -> tuple[str, list[Any]]:
        """Key and shapes of the constants of a bucket's program, from the store or by tracing it."""
        if bucket not in self._described:
            folded = folded or self._folded(bucket)

            def make() -> Any:
                made = folded()
                listed = [[list(o.shape), str(o.dtype), bool(o.weak_type)] for o in made.shapes]
                return [digest(made.key), listed]

            spec = self._plain(f"constants of {bucket}", bucket)
            key, listed = make() if self._store is None else self._store.facts(spec, make)
            self._described[bucket] = (
                key,
                [
                    jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype), weak_type=weak)
                    for shape, dtype, weak in listed
                ],
            )
        return self._described[bucket]

    def _shared(self, bucket: Bucket, folded: Callable[[], FoldedProgram]) -> list[jax.Array]:
        """Constants of a bucket's program, which others share."""
        key, shapes = self._constants_of(bucket, folded)
        if key not in self._constants:
            leaves = jax.tree.leaves(self._weights)
            spec = ProgramSpec(
                name=f"constants {key}", arguments=(leaves,), outputs=[0] * len(shapes)
            )
            made = made_ready(
                self._store, spec, lambda: jax.jit(folded().fold).lower(*spec.arguments)
            )
            self._constants[key] = made.compiled(leaves)
        return self._constants[key]

    def outputs(self, bucket: Bucket) -> dict[str, jax.ShapeDtypeStruct]:
        """Outputs of a bucket's program by name."""
        spec = self._plain(f"outputs of {bucket}", bucket)
        if self._store is None:
            return self._jitted.eval_shape(*spec.arguments)

        def make() -> dict[str, Any]:
            made = self._jitted.eval_shape(*spec.arguments)
            return {name: [list(one.shape), str(one.dtype)] for name, one in made.items()}

        return {
            name: jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))
            for name, (shape, dtype) in self._store.facts(spec, make).items()
        }

    def __call__(self, rows: Sequence[Row], bucket: Bucket) -> list[dict[str, np.ndarray]]:
        """Outputs of each row by name; compiles the bucket's program if that was not done before."""
        self.compile(bucket)
        where = self.form.shardings
        batch = {
            name: jax.device_put(array, where[name])
            for name, array in self.form.batch(rows, bucket).items()
        }
        made = jax.device_get(self._compiled[bucket](batch))
        # A copy, so that an answer does not keep the whole batch in memory.
        return [
            {name: np.array(array[index]) for name, array in made.items()}
            for index in range(len(rows))
        ]

    def up(self, rows: int) -> int:
        """The least number of rows, at least ``rows``, that the devices divide."""
        return -(-rows // self.form.ways) * self.form.ways
