"""Compiled programs, counted: a second compile of the same step reports which argument changed."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from systolic.core.machine import trim
from systolic.core.shutdown import start_native
from systolic.training.ledger import Ledger, Spent

Signature = Mapping[str, tuple[tuple[int, ...], str]]


class CompiledStep:
    """Function compiled once for each signature of its batch.

    Args:
        name: For events.
        jitted: ``jax.jit`` of ``function(*state, batch)``.
        report: Called with (event, seconds, detail) after each compile; the seconds are those that the ledger has
            of it, so that events add up to its account: a compile in a thread takes longer, beside other work.
    """

    def __init__(
        self, name: str, jitted: Any, ledger: Ledger, report: Callable[[str, float, str], None]
    ) -> None:
        self.name, self._jitted, self._ledger, self._report = name, jitted, ledger, report
        self._compiled: dict[Any, Any] = {}
        self._signature: Signature = {}
        self._ahead: _Ahead | None = None
        self._refused: bool | None = None
        self._waited = 0.0
        """Seconds of the present compile that the ledger has."""
        self.recompiles = 0

    def prepare(self, *arguments: Any) -> None:
        """Traces the program for abstract arguments and starts to compile it in a thread.

        A later call with a batch of another signature counts as a recompile: the
        data is not what its fields say.
        """
        started = self._ledger.clock()
        with self._ledger.spend(Spent.compile):
            lowered = self._jitted.lower(*arguments)
            self._ahead = _Ahead(lowered, arguments[-1])
        self._waited += self._ledger.clock() - started

    def adopt(self, batch: Mapping[str, Any], compiled: Any, seconds: float) -> None:
        """Uses a program compiled elsewhere for batches like ``batch``, instead of compiling.

        Args:
            batch: Arrays or ShapeDtypeStructs.
            compiled: ``jax.stages.Compiled`` of the same function.
            seconds: Time of loading it.
        """
        self._keep(batch, compiled, seconds, "load")

    def wait(self, seconds: float) -> bool:
        """Whether the compile started by :meth:`prepare` is done, after waiting at most ``seconds``."""
        if self._ahead is None:
            return True
        started = self._ledger.clock()
        with self._ledger.spend(Spent.compile):
            done = self._ahead.wait(seconds)
        self._waited += self._ledger.clock() - started
        return done

    def __call__(self, *arguments: Any) -> Any:
        """Runs the program on (*state, batch), compiling it first where the batch is of a new shape."""
        batch = arguments[-1]
        if self._ahead is not None:
            self._await(self._ahead)
        compiled = self._compiled.get(_key(batch))
        if compiled is None:
            compiled = self._compile(arguments)
        if self._refused is None:
            self._refused = _in_4_bits_on_a_cpu(arguments)
        return self._jitted(*arguments) if self._refused else compiled(*arguments)

    def _await(self, ahead: "_Ahead") -> None:
        self._ahead, started = None, self._ledger.clock()
        with self._ledger.spend(Spent.compile):
            compiled = ahead.result()
        self._waited += self._ledger.clock() - started
        self._keep(ahead.batch, compiled, self._waited)
        self._waited = 0.0

    def _compile(self, arguments: tuple[Any, ...]) -> Any:
        start = self._ledger.clock()
        with self._ledger.spend(Spent.compile):
            compiled = self._jitted.lower(*arguments).compile()
            trim()
        self._keep(arguments[-1], compiled, self._ledger.clock() - start)
        return compiled

    def _keep(
        self, batch: Mapping[str, Any], compiled: Any, seconds: float, event: str = "compile"
    ) -> None:
        signature = {name: (array.shape, str(array.dtype)) for name, array in batch.items()}
        if self._signature:
            self.recompiles += 1
            self._report(
                "recompile", seconds, f"{self.name} step: {_difference(self._signature, signature)}"
            )
        else:
            self._report(event, seconds, f"{self.name} step")
        self._signature = signature
        self._compiled[_key(batch)] = compiled


class _Ahead:
    """Compile in its own thread; XLA releases Python's lock."""

    def __init__(self, lowered: Any, batch: Mapping[str, Any]) -> None:
        self.batch, self._lowered = batch, lowered
        self._compiled: Any = None
        self._error: Exception | None = None
        self._thread = start_native("compile", self._run)

    def wait(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def result(self) -> Any:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._compiled

    def _run(self) -> None:
        try:
            self._compiled = self._lowered.compile()
            trim()
        except Exception as error:  # raised again where the program is called
            self._error = error


def _in_4_bits_on_a_cpu(arguments: Any) -> bool:
    """Whether JAX (0.10.2) would refuse arguments of a program compiled ahead.

    On a CPU its uint4 arrays have layouts of 0 bits an element and programs ask for 4. A call of the jitted
    function has no such check; its compile is found in the compilation cache.
    """
    return any(
        leaf.dtype == jnp.uint4 and next(iter(leaf.devices())).platform == "cpu"
        for leaf in jax.tree.leaves(arguments)
        if isinstance(leaf, jax.Array)
    )


def _key(batch: Mapping[str, Any]) -> Any:
    return tuple(sorted((name, array.shape, str(array.dtype)) for name, array in batch.items()))


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
