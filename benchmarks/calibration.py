"""Calibrations held against truth: fitted on one profile of a chip, judged on another.

``python benchmarks/calibration.py FOLDER`` with the profiles of ``FILES``, which tests/recorded/chips/README.md names the
sources of. Prints Markdown: by kind of op the error of all its time, and the mean error of its ops weighted by their time,
before and after, and whether the measured time lies in the range that the spread gives.

- TPU7x: fitted on a serving step in bf16, judged on two of a model with quantized weights, and the other way round.
- v6e: fitted on the odd steps of a run on eight chips, judged on the even ones, and on the first and second half.
- Train steps of Qwen3 8B on v6e-8 by XProf category (benchmarks/results/2026-11-22-buckets-quick.md): factors of the step of four rows of 2,048
  tokens a chip on the others.
- Factors of the TPU7x steps on single operations that others measured (benchmarks/results/2026-11-22-operations.jsonl).
"""

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from systolic.chips import slice
from systolic.explaining.calibrating import MeasuredOps, OpRatio, fit, measured_ops
from systolic.forecasting.profiled import programs_of
from systolic.profile import Profile, open_profile
from systolic.profile.table import ProfileTable
from systolic.sim.calibration import Calibration, CostKind
from systolic.sim.incomplete import Given
from systolic.sim.rates import rates_of
from systolic.sim.simulate import simulate

BF16 = "tpu7x-1chip-tp2-qwen2.5-32b-bf16-1024tokens.trace.json.gz"
QUANTIZED = "tpu7x-1chip-tp2-qwen3-32b-quantized-a.trace.json.gz"
SECOND = "tpu7x-1chip-tp2-qwen3-32b-quantized-b.trace.json.gz"
"""vllm-project/tpu-inference @93aca414a, profiles/plugins/profile/2026_01_12_01_08_50; left out where it is not there."""
STEPS = "v6e-8-allreduce-host-offload.xplane.pb"
OPERATIONS = Path(__file__).parent / "results" / "2026-11-22-operations.jsonl"
BUCKETS = Path(__file__).parent / "results" / "2026-11-22-buckets-quick.md"
"""Published categories of train steps, with what was forecast of them that day."""
PARTS = ("matmul", "attention", "loops", "formatting", "collective")
"""Those of them that a calibration has a kind for; ``loops`` are elementwise fusions."""
_CELL = re.compile(r"(\w+) ([\d.]+) s, ([\d.]+) s, [+-]\d+%")
ROWS = {"matmul": CostKind.matmul, "all-reduce": CostKind.all_reduce}
"""Kinds of the published operations that a factor of the steps is of."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    steps = {
        name: ops_of(open_profile(folder / file, "tpu7x"), "tpu7x-2")
        for name, file in (("bf16", BF16), ("quantized a", QUANTIZED), ("quantized b", SECOND))
        if (folder / file).is_file()
    }
    for one, other in (
        ("bf16", "quantized a"),
        ("bf16", "quantized b"),
        ("quantized a", "bf16"),
        ("quantized a", "quantized b"),
    ):
        if one in steps and other in steps:
            compare(f"TPU7x, {one} -> {other}", "tpu7x-2", [steps[one]], steps[other])
    profile = open_profile(folder / STEPS)
    for title, chosen in (
        ("odd -> even steps", lambda number, _: number % 2 == 0),
        ("first -> second half", lambda number, total: number < total // 2),
    ):
        halves = [
            ops_of(part(profile, keep), "v6e-8")
            for keep in (chosen, lambda n, total, by=chosen: not by(n, total))
        ]
        compare(f"v6e-8, {title}", "v6e-8", halves[:1], halves[1])
        whole_step(profile, halves[0], lambda n, total, by=chosen: not by(n, total))
    train_steps()
    operations(steps["bf16"])


def ops_of(profile: Profile, on: str) -> MeasuredOps:
    """Ops of a profile beside their prices."""
    table = ProfileTable(profile)
    return measured_ops(table, slice(on), programs_of(table))


def part(profile: Profile, keep: Callable[[int, int], bool]) -> Profile:
    """The steps of a profile, and runs of its other programs, that ``keep`` takes by their number among all of their program."""
    made = []
    for one in profile.devices:
        numbers: dict[str, int] = {}
        totals: dict[str, int] = {}
        for run in one.programs:
            totals[run.name] = totals.get(run.name, 0) + 1
        runs = []
        for run in one.programs:
            number = numbers.get(run.name, 0)
            numbers[run.name] = number + 1
            if keep(number, totals[run.name]):
                runs.append(run)
        ops = [
            op
            for op in one.trace.ops
            if any(run.start - 1e-6 <= op.start and op.end <= run.end + 1e-6 for run in runs)
        ]
        main_runs = [run for run in runs if run.name == one.runs[0].name]
        made.append(
            replace(
                one,
                trace=replace(one.trace, ops=ops, runs=runs, marks=[]),
                steps=[(run.start, run.end) for run in main_runs],
                runs=main_runs,
                programs=runs,
                others=(),
            )
        )
    return replace(made[0], others=made[1:])


def compare(title: str, on: str, fitted_on: Sequence[MeasuredOps], judged: MeasuredOps) -> None:
    """A table of errors by kind on ops that were not used to fit."""
    fitted = fit(fitted_on, rates_of(slice(on)).host)
    calibration = Calibration(name="", chip=slice(on).chip.name, factors=fitted.factors)
    kinds: dict[CostKind, list[OpRatio]] = {}
    for one in judged.ratios:
        kinds.setdefault(one.kind, []).append(one)
    print(f"\n### {title}\n")
    print(
        "| kind | ops | measured | time: before | after | ops: before | after | in the range | factor |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    before, after, whole = 0.0, 0.0, 0.0
    for kind, ops in sorted(kinds.items(), key=lambda item: -sum(o.seconds for o in item[1])):
        rows = [seconds_of(one, on) for one in ops]
        scale = scale_of(calibration, kind, on)
        was, now = errors(rows, 1.0), errors(rows, scale or 1.0)
        total, simulated = (sum(column) for column in zip(*rows, strict=True))
        before, after = before + simulated, after + simulated * (scale or 1.0)
        whole += total
        ends = calibration.ends(kind)
        held = "-"
        if ends is not None and scale is not None:
            held = "yes" if ends[0] <= total / (simulated * scale) <= ends[1] else "no"
        factor = "none" if scale is None else f"{scale:.3f}"
        print(
            f"| {kind.value} | {len(ops)} | {total * 1e3:.3f} ms | {was[0]:+.1%} | {now[0]:+.1%} | {was[1]:.1%} | {now[1]:.1%} | {held} | {factor} |"
        )
    print(
        f"| all with a price | {len(judged.ratios)} | {whole * 1e3:.3f} ms | {before / whole - 1:+.1%} | {after / whole - 1:+.1%} | | | | |"
    )
    share = judged.matched / judged.total
    rest = ", ".join(f"{name} {s * 1e3:.2f} ms" for name, s in list(judged.unmatched.items())[:4])
    print(f"\n{share:.0%} of the judged ops' time has a price; without: {rest or 'nothing'}.")
    for text in fitted.left_out:
        print(f"Left out of the fit: {text}.")


def whole_step(
    profile: Profile, fitted_on: MeasuredOps, judged: Callable[[int, int], bool]
) -> None:
    """The simulated step of the judged half with and without the factors of the other."""
    on, table = slice("v6e-8"), ProfileTable(part(profile, judged))
    name = table.programs[0].name
    module = programs_of(table)[name]
    factors = fit([fitted_on], rates_of(on).host).factors
    calibration = Calibration(name="", chip="v6e", factors=factors)
    measured = table.programs[0].median
    plain = simulate(module, on).seconds
    corrected = simulate(module, on, given=Given(calibration=calibration)).seconds
    print(
        f"\nThe step {name}: measured {measured * 1e3:.1f} ms, simulated {plain * 1e3:.1f} ms ({plain / measured - 1:+.1%}), with the factors {corrected * 1e3:.1f} ms ({corrected / measured - 1:+.1%})."
    )


def seconds_of(one: OpRatio, on: str) -> tuple[float, float]:
    """Measured and simulated seconds of an op in a run of its program."""
    if one.kind is CostKind.host:
        return one.weight / one.value, one.weight / rates_of(slice(on)).host
    return one.value * one.weight, one.weight


def scale_of(calibration: Calibration, kind: CostKind, on: str) -> float | None:
    """Corrected over simulated seconds; None of a kind without a factor."""
    if kind not in calibration.factors:
        return None
    if kind is CostKind.host:
        return rates_of(slice(on)).host / calibration.factors[kind].value
    return calibration.factors[kind].value


def errors(rows: Sequence[tuple[float, float]], scale: float) -> tuple[float, float]:
    """Error of the sum, and the mean error of the ops weighted by their measured time."""
    measured = sum(seconds for seconds, _ in rows)
    total = sum(scale * simulated for _, simulated in rows)
    apart = sum(abs(scale * simulated - seconds) for seconds, simulated in rows)
    return total / measured - 1, apart / measured


def train_steps() -> None:
    """Factors by category of one train step, on the steps of other batches and lengths of the same model."""
    rows = {
        cells[0]: {name: (float(chip), float(ours)) for name, chip, ours in _CELL.findall(line)}
        for line in BUCKETS.read_text().splitlines()
        if line.startswith("| qwen3") and (cells := line.strip("| ").split(" | "))
    }
    first = next(iter(rows))
    factors = {name: rows[first][name][0] / rows[first][name][1] for name in PARTS}
    print(f"\n### v6e-8, train steps by category: {first} -> the others\n")
    print("| kind | factor | steps | mean abs. error before | after |")
    print("|---|---|---|---|---|")
    others = {name: row for name, row in rows.items() if name != first}
    for name, factor in factors.items():
        found = [row[name] for row in others.values() if name in row]
        was, now = (
            sum(abs(ours * scale / chip - 1) for chip, ours in found) / len(found)
            for scale in (1.0, factor)
        )
        print(f"| {name} | {factor:.3f} | {len(found)} | {was:.1%} | {now:.1%} |")
    steps = []
    for row in others.values():
        if all(name in row for name in PARTS):
            chip, ours = row["step"]
            corrected = ours + sum((factors[name] - 1) * row[name][1] for name in PARTS)
            steps.append((ours / chip - 1, corrected / chip - 1))
    was, now = (sum(abs(pair[at]) for pair in steps) / len(steps) for at in (0, 1))
    listed = ", ".join(f"{one:+.1%} to {other:+.1%}" for one, other in steps)
    print(
        f"| step | | {len(steps)} | {was:.1%} | {now:.1%} |\n\nSteps with all categories: {listed}."
    )


def operations(ops: MeasuredOps) -> None:
    """The factors of a step on single operations from other sources, whose forecasts have the compiler's cycles."""
    factors = fit([ops], rates_of(slice("tpu7x-2")).host).factors
    rows: list[Mapping[str, object]] = [json.loads(line) for line in OPERATIONS.open()]
    print("\n### TPU7x, bf16 -> single operations measured by others\n")
    print("| kind | operations | mean abs. error before | after | mean error before | after |")
    print("|---|---|---|---|---|---|")
    for name, kind in ROWS.items():
        if kind not in factors:
            print(f"| {name} | - | no factor: the step has no such op between chips | | | |")
            continue
        of = [
            float(str(row["forecast_seconds"])) / float(str(row["measured_seconds"]))
            for row in rows
            if (row.get("generation"), row.get("kind"), row.get("mode")) == ("tpu7x", name, "full")
        ]
        cells = [
            sum(values) / len(values)
            for scale in (1.0, factors[kind].value)
            for values in ([abs(r * scale - 1) for r in of], [r * scale - 1 for r in of])
        ]
        print(
            f"| {name} | {len(of)} | {cells[0]:.1%} | {cells[2]:.1%} | {cells[1]:+.1%} | {cells[3]:+.1%} |"
        )


if __name__ == "__main__":
    main()
