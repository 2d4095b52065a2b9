"""Compiled programs, counted: a second compile of the same step says which argument changed."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from systolic.train.ledger import Ledger

Signature = Mapping[str, tuple[tuple[int, ...], str]]


class Program:
    """A function compiled once for each signature of its batch.

    Args:
        name: For events.
        jitted: ``jax.jit`` of ``function(*state, batch)``.
        report: Called with (event, seconds, detail) after each compile.
    """

    def __init__(
        self, name: str, jitted: Any, ledger: Ledger, report: Callable[[str, float, str], None]
    ) -> None:
        self.name, self._jitted, self._ledger, self._report = name, jitted, ledger, report
        self._compiled: dict[Any, Any] = {}
        self._signature: Signature = {}
        self.recompiles = 0

    def __call__(self, *arguments: Any) -> Any:
        """Runs the program on (*state, batch), compiling it first where the batch is of a new shape."""
        batch = arguments[-1]
        key = tuple((name, array.shape, array.dtype) for name, array in batch.items())
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compile(key, arguments)
        return compiled(*arguments)

    def _compile(self, key: Any, arguments: tuple[Any, ...]) -> Any:
        start = self._ledger.clock()
        with self._ledger.spend("compile"):
            compiled = self._jitted.lower(*arguments).compile()
        seconds = self._ledger.clock() - start
        signature = {name: (array.shape, str(array.dtype)) for name, array in arguments[-1].items()}
        if self._signature:
            self.recompiles += 1
            self._report(
                "recompile", seconds, f"{self.name} step: {_difference(self._signature, signature)}"
            )
        else:
            self._report("compile", seconds, f"{self.name} step")
        self._signature = signature
        self._compiled[key] = compiled
        return compiled


def _difference(old: Signature, new: Signature) -> str:
    changes = []
    for name in {**old, **new}:
        if old.get(name) != new.get(name):
            changes.append(f"{name} was {_text(old.get(name))} and is {_text(new.get(name))}")
    return "; ".join(changes)


def _text(entry: tuple[tuple[int, ...], str] | None) -> str:
    if entry is None:
        return "absent"
    shape, dtype = entry
    return f"{dtype}[{','.join(map(str, shape))}]"


def compiler_cache(folder: str) -> None:
    """Keeps compiled programs across processes in ``folder`` (JAX's persistent compilation cache)."""
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
