"""Fits sim/estimates.toml: slowdowns per generation, to the cycles of every whole compile in the store.

``python benchmarks/accuracy/fit_estimates.py`` prints the table and, for each generation, how far the
estimated step is from the one with the compiler's cycles, program by program.
"""

import json
from collections import Counter, defaultdict

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


def samples() -> dict[str, list[tuple[str, tuple[float, ...], float, float]]]:
    """By generation: program, parts in seconds, seconds by cycles, times it runs."""
    found: dict[str, list[tuple[str, tuple[float, ...], float, float]]] = defaultdict(list)
    for path in sorted((cache_home() / "programs").glob("*/*/report.json")):
        report = json.loads(path.read_text())
        if "schedule_only" in report["options"] or not (path.parent / "module.hlo.gz").exists():
            continue
        module = parse(Compiled(path.parent, report["digest"], True).hlo)
        on = slice(report["slice"])
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
    for generation, rows in sorted(samples().items()):
        matrix, memory, vector, transposed = np.array([row[1] for row in rows]).T
        seconds = np.array([row[2] for row in rows])
        times = np.array([row[3] for row in rows], float)
        weight = seconds * times / np.sum(seconds * times)

        def predicted(logs, matrix=matrix, memory=memory, vector=vector, transposed=transposed):
            a, b, c, d = np.exp(logs)
            return (
                np.maximum(np.maximum(a * matrix, b * memory), c * vector + d * transposed) + 1e-8
            )

        def loss(logs, weight=weight, seconds=seconds, predicted=predicted):
            return np.sum(weight * np.abs(np.log(predicted(logs) / seconds)))

        starts = ((1.1, 1.2, 1.0, 8.0), (1.1, 1.2, 5.0, 100.0))
        fits = [
            minimize(loss, np.log(start), method="Nelder-Mead", options={"maxiter": 4000})
            for start in starts
        ]
        best = min(fits, key=lambda fit: fit.fun)
        names = ("matrix", "memory", "vector", "transpose")
        print(f"[{generation}]")
        for name, value in zip(names, np.exp(best.x), strict=True):
            print(f"{name} = {value:.3g}")
        guess = predicted(best.x)
        programs = list(dict.fromkeys(row[0] for row in rows))
        ratios = []
        for program in programs:
            mine = np.array([row[0] == program for row in rows])
            ratios.append(np.sum((guess * times)[mine]) / np.sum((seconds * times)[mine]))
        shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(
            f"# {len(rows)} ops of {len(programs)} programs; core time over the compiler's: {shown}\n"
        )


if __name__ == "__main__":
    main()
