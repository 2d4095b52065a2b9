"""The tiny recipe for trials: with a checkpoint at the end alone, as each takes as long as its steps."""

import functools
import inspect
from typing import Any

from systolic.job import Checkpoints, Job
from tests.training import tiny

LAST = Checkpoints(every=16)


@functools.wraps(tiny.job, [name for name in functools.WRAPPER_ASSIGNMENTS if name != "__module__"])
def job(**options: Any) -> Job:
    return tiny.job(**{"checkpoints": LAST, **options})


_given = inspect.signature(tiny.job)
_own = [
    one.replace(default=LAST) if one.name == "checkpoints" else one
    for one in _given.parameters.values()
]
job.__signature__ = _given.replace(parameters=_own)
