"""The jitted programs of a job: what is trained and what is forecast is one and the same."""

from typing import Any

import jax

from systolic.steps.steps import Steps


def jit_train(steps: Steps) -> Any:
    """The train step, jitted: (state, batch) -> (state, metrics); the state's memory is reused."""
    return jax.jit(
        steps.train,
        donate_argnums=0,
        in_shardings=(steps.shardings, steps.batch_shardings),
        out_shardings=(steps.shardings, None),
        compiler_options=steps.target.compiler_options,
    )


def jit_evaluate(steps: Steps) -> Any:
    """The eval step, jitted: (params, rest, batch) -> sums."""
    return jax.jit(steps.evaluate, compiler_options=steps.target.compiler_options)
