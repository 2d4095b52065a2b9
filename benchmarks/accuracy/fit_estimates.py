"""Fits sim/estimates.toml: slowdowns per generation, to the cycles of every whole compile in the store.

``python benchmarks/accuracy/fit_estimates.py`` prints the table and, for each generation, how far the
estimated time of matmuls is from the compiler's, program by program.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
from scipy.optimize import minimize

from systolic.aot import Compiled
from systolic.chips import slice
from systolic.core.store import cache_home
from systolic.hlo import parse
from systolic.hlo.loops import trip_count
from systolic.sim.estimate import parts
from systolic.sim.rates import rates_of
from systolic.sim.work import work_of

Sample = tuple[str, tuple[float, ...], float, float]


def samples() -> dict[str, list[Sample]]:
    """By generation: program, parts in seconds, seconds by cycles, times it runs."""
    found: dict[str, list[Sample]] = defaultdict(list)
    for path in sorted((cache_home() / "programs").glob("*/*/report.json")):
        report = json.loads(path.read_text())
        if "schedule_only" in report["options"] or not (path.parent / "module.hlo.gz").exists():
            continue
        on = slice(report["slice"])
        if on.platform != "tpu":
            continue
        module = parse(Compiled(path.parent, path.parent.name, True).hlo)
        rates = rates_of(on)
        times: Counter[str] = Counter({module.entry.name: 1})
        order = [module.entry.name]
        for name in order:
            for op in module.computations[name]:
                if op.opcode == "while":
                    body = op.called("body") or ""
                    count = trip_count(module, module.computations[name], op) or 1
                    times[body] += count * times[name]
                    order.append(body)
        for name in dict.fromkeys(order):
            computation = module.computations[name]
            for op in computation:
                if op.cycles is not None:
                    work = work_of(module, computation, op)
                    found[on.chip.name].append(
                        (
                            report["digest"],
                            parts(module, computation, op, work, rates),
                            op.cycles / rates.clock_hz,
                            times[name],
                        )
                    )
    return found


def main() -> None:
    rows = [row for of in samples().values() for row in of]
    fit("all", [row for row in rows if row[1][0] > 0 and row[2] > SHORT])


SHORT = 2e-6
"""Seconds below which an op is all overhead."""


def fit(generation: str, rows: Sequence[Sample]) -> None:
    """Matmuls alone: what has none is priced by bytes."""
    matrix, memory, vector, _ = np.array([row[1] for row in rows]).T
    seconds = np.array([row[2] for row in rows])
    times = np.array([row[3] for row in rows], float)
    # Between counting ops alike and counting them by their time.
    weight = np.sqrt(seconds)
    weight /= weight.sum()

    def predicted(logs: np.ndarray) -> np.ndarray:
        a, b, c = np.exp(logs)
        return a * matrix + np.maximum(b * memory, c * vector) + 1e-8

    def loss(logs: np.ndarray) -> float:
        near = PRIOR * float(np.sum((logs - np.log((1.1, 1.0, 1.0))) ** 2))
        return float(np.sum(weight * np.abs(np.log(predicted(logs) / seconds)))) + near

    starts = ((1.1, 1.0, 1.0), (1.1, 2.0, 4.0), (1.3, 0.3, 0.3))
    best = min(
        (minimize(loss, np.log(start), method="Nelder-Mead") for start in starts),
        key=lambda one: one.fun,
    )
    print(f"[{generation}]")
    for name, value in zip(("matrix", "memory", "vector"), np.exp(best.x), strict=True):
        print(f"{name} = {value:.3g}")
    guess = predicted(best.x)
    ratios = []
    for program in dict.fromkeys(row[0] for row in rows):
        mine = np.array([row[0] == program for row in rows])
        ratios.append(np.sum((guess * times)[mine]) / np.sum((seconds * times)[mine]))
    shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    print(
        f"# {len(rows)} matmuls of {len(ratios)} programs; their time over the compiler's: {shown}\n"
    )


PRIOR = 1e-3
"""Pulls what the samples do not tell towards the catalogue's rates."""


if __name__ == "__main__":
    main()
