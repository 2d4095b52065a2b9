"""Programs as bytes for the child: by cloudpickle, with ``jax.jit`` functions as function and options.

A ``jax.jit`` object that is pickled directly can be called but not traced. Code keeps the name of its file, which
cloudpickle drops: the compiler's text, and so every table of costs, names lines of it.
"""

import io
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

from systolic.core.errors import OptionError

_TOLD = (
    "static_argnums",
    "static_argnames",
    "donate_argnums",
    "donate_argnames",
    "keep_unused",
    "inline",
)
"""Arguments of ``jax.jit`` that are valid in another process; shardings among the others are refused."""


def dumps(value: Any) -> bytes:
    """``value`` as bytes for ``pickle.loads``.

    Raises:
        OptionError: a jitted function has shardings, which refer to this process's devices.
    """
    import cloudpickle

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            jax = sys.modules.get("jax")
            if jax is not None and isinstance(obj, jax.stages.Wrapped):
                info = vars(obj).get("_jit_info")
                if info is not None:
                    return jitted, (obj.__wrapped__, _options(obj, info))
            if isinstance(obj, CodeType) and Path(obj.co_filename).is_file():
                _, arguments, *_ = self.dispatch_table[CodeType](obj)
                return placed, (arguments, obj.co_filename)
            return super().reducer_override(obj)

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


def jitted(function: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """Restores a ``jax.jit`` function."""
    import jax

    return jax.jit(function, **options)


def placed(arguments: Sequence[Any], filename: str) -> CodeType:
    """Restores code with the name of its file."""
    return CodeType(*arguments).replace(co_filename=filename)


def _options(function: Any, info: Any) -> dict[str, Any]:
    from jax.sharding import Sharding

    given = (*info.in_shardings_leaves, *info.out_shardings_leaves)
    if any(isinstance(leaf, Sharding) for leaf in given):
        raise OptionError(
            f"{function.__name__} is jitted with shardings of this machine's devices; jit it without them, and give systolic.Spread its in_specs and mesh"
        )
    return {name: getattr(info, name) for name in _TOLD}
