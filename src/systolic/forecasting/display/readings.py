"""Formats the figures of a forecast, the same in the terminal and on the page."""

from collections.abc import Mapping
from dataclasses import dataclass

from systolic.chips.flags import described
from systolic.compiling.gpu_compiler import EXTRA, PLUGINS, advice
from systolic.core.units import Origin, duration, gibibytes, si
from systolic.forecasting import Forecast
from systolic.forecasting.cautions import summary
from systolic.forecasting.forecast import TimeBound
from systolic.report import figures
from systolic.report.figures import Tone, Verdict

SCALES = {
    "tokens": ("billion tokens", 1e9),
    "examples": ("million examples", 1e6),
    "steps": ("million steps", 1e6),
}
CLOSE = 0.9
"""Share of the memory above which little is left for allocations that the compiler does not count."""

RESOURCES = {
    "mxu": "the matrix units",
    "vpu": "the vector units",
    "hbm": "device memory",
    "ici": "waiting for chips",
    "dcn": "waiting for slices",
    "host": "waiting for the host",
    "idle": "idle",
}
"""Names of the resources."""
ELSEWHERE = {
    "mxu": "matmuls",
    "vpu": "elementwise work",
    "ici": "waiting for the other GPUs",
    "dcn": "waiting for the network",
    "host": "starting kernels",
}
"""Names that differ on CPUs and GPUs."""
GPU_NAMES = {
    "mxu": "tensor",
    "vpu": "f32",
    "hbm": "memory",
    "ici": "NVLink",
    "dcn": "network",
    "host": "host",
}
"""Short names on GPUs: tensor cores, f32 lanes, device memory."""
GPU_LANES = {"core": "compute stream", "ici": "NVLink", "dcn": "host network"}
"""Names of lanes that differ on GPUs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Portion:
    """Part of a whole: bytes of a kind of memory, or seconds of a resource."""

    key: str
    name: str
    value: float
    share: float
    """Share of the whole, 0 to 1."""
    text: str


def verdict(forecast: Forecast) -> Verdict:
    """Verdict on the memory: whether the step fits, and by how much."""
    need, have = forecast.need_bytes, forecast.capacity_bytes
    if not forecast.fits:
        space = "hbm" if forecast.rejected is None else forecast.rejected.space
        where = "" if space == "hbm" else f" of {space}"
        if not need:
            return Verdict(
                word="does not fit", sentence=f"More than {gibibytes(have)}{where}.", tone=Tone.bad
            )
        sentence = f"Needs {gibibytes(need)}{where}, {gibibytes(have)} available ({gibibytes(need - have)} over)."
        return Verdict(word="does not fit", sentence=sentence, tone=Tone.bad)
    if have and need > have:  # of a dump, whose compiler may have shared more
        return Verdict(
            word="may fit",
            sentence=f"{gibibytes(need)} by the lifetimes of its arrays, {gibibytes(have)} available.",
            tone=Tone.fair,
        )
    spare = f"{gibibytes(have - need)} of {gibibytes(have)} to spare" if have else "memory unknown"
    tone = Tone.fair if have and need > CLOSE * have else Tone.good
    if forecast.doubt:
        return Verdict(word="fits", sentence=f"{_first(forecast.doubt)}; {spare}.", tone=Tone.fair)
    if forecast.is_lower_bound:
        time_text = f"Time is {bound(forecast)}: {summary(forecast.incomplete)}"
        return Verdict(word="fits", sentence=f"{time_text}; {spare}.", tone=Tone.fair)
    return Verdict(word="fits", sentence=f"{spare}.", tone=tone)


def _first(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


def bound(forecast: Forecast) -> str:
    """``a lower bound``, or ``open`` where an assumed part may take less too; empty of a complete time."""
    words = {TimeBound.complete: "", TimeBound.lower: "a lower bound", TimeBound.open: "open"}
    return words[forecast.bound]


def least(forecast: Forecast) -> str:
    """``at least`` before a time that is a lower bound."""
    return "at least " if bound(forecast) == "a lower bound" else ""


def speed(forecast: Forecast) -> list[tuple[str, str]]:
    """Step time, throughput and utilisation as (name, text); unknown ones are left out."""
    if forecast.step_seconds is None:
        return []
    rows = [("step", f"{least(forecast)}{duration(forecast.step_seconds)}")]
    if (rate := forecast.units_per_second) is not None and forecast.unit != "calls":
        rows.append(("throughput", f"{si(rate)} {forecast.unit}/s"))
    if not forecast.is_lower_bound:  # The FLOPs of unknown kernels are not counted either.
        of_bf16, of_own = ("", "")
        if forecast.has_several_peaks:
            formats = sorted(forecast.flops_by_format, key=lambda name: name == "bf16")
            of_bf16 = " of the bf16 peak"
            of_own = f" of the {' and '.join(formats)} peak{'s' * (len(formats) > 1)}"
        rows += [
            (name, f"{text}{peak}")
            for name, text, peak in (
                ("MFU", figures.percent(forecast.mfu), of_bf16),
                ("HFU", figures.percent(forecast.hfu), of_own),
            )
            if text != figures.MISSING
        ]
    rows += [
        ("bound by", forecast.bound_by or figures.MISSING),
    ]
    return [(name, text) for name, text in rows if text != figures.MISSING]


def words(forecast: Forecast) -> dict[str, str]:
    """Names of the resources on the forecast's platform."""
    return RESOURCES if forecast.on.platform == "tpu" else {**RESOURCES, **ELSEWHERE}


def short_names(forecast: Forecast) -> dict[str, str]:
    """Short names of the resources on the forecast's platform; those of a TPU are its units' own."""
    usual = {name: name for name in RESOURCES}
    return {**usual, **(GPU_NAMES if forecast.on.platform == "gpu" else {})}


def lanes(forecast: Forecast, usual: Mapping[str, str]) -> dict[str, str]:
    """Names of the lanes on the forecast's platform; ``usual`` are those of a TPU."""
    return {**usual, **(GPU_LANES if forecast.on.platform == "gpu" else {})}


def interval(forecast: Forecast) -> str:
    """``5.85 ms to 9.75 ms``, ``5.85 ms or more`` of a lower bound; empty without one."""
    if forecast.low is None:
        return ""
    if forecast.high is None:
        return f"{duration(forecast.low)} or more"
    return f"{duration(forecast.low)} to {duration(forecast.high)}"


def time_origin(forecast: Forecast) -> str:
    """Origin of the step time: ``simulated``, or ``lower bound`` or ``open`` with parts of unknown time; and what the user gave."""
    origin = bound(forecast).removeprefix("a ") or forecast.origin.value
    if not forecast.given:
        return origin
    return f"{origin}, {figures.plural(len(forecast.given), 'number')} given"


def times(forecast: Forecast) -> str:
    """Origin of the times in a sentence of the page."""
    if forecast.doubt:
        return f"{forecast.origin.value}: {forecast.doubt}"
    roofline = forecast.origin is Origin.assumed
    origin = (
        f"{forecast.origin.value}{': a roofline' if roofline else ' from the compiled schedule'}"
    )
    if forecast.is_lower_bound:
        origin += f", {bound(forecast)} ({summary(forecast.incomplete)})"
    return f"{origin}, with {'; '.join(forecast.given)} as given" if forecast.given else origin


def memory_origin(forecast: Forecast) -> Origin:
    """Origin of the peak: compiled, simulated from the schedule, or assumed."""
    return forecast.memory_origin


def memory_parts(forecast: Forecast) -> list[Portion]:
    """The peak by kind, as shares of the device's memory."""
    if forecast.memory is None:
        return []
    whole = max(forecast.capacity_bytes, forecast.memory.peak_bytes, 1)
    return [
        Portion(key=_key(kind), name=kind, value=size, share=size / whole, text=gibibytes(size))
        for kind, size in forecast.memory.by_kind.items()
    ]


def _key(kind: str) -> str:
    return kind.replace(" ", "-")


def time_parts(forecast: Forecast) -> list[Portion]:
    """Step time by resource."""
    if not forecast.step_seconds:
        return []
    step, names = forecast.step_seconds, short_names(forecast)
    return [
        Portion(key=name, name=names[name], value=s, share=s / step, text=duration(s))
        for name, s in forecast.time_by_resource.items()
        if s / step > 5e-4
    ]


def money(forecast: Forecast) -> str:
    """Dollars per hour and per unit of work; empty without a price."""
    bill = forecast.bill
    if bill.usd_per_hour is None:
        return ""
    text = f"${bill.usd_per_hour:,.2f}/h on demand"
    if bill.spot_usd_per_hour is not None:
        text += f", ${bill.spot_usd_per_hour:,.2f} spot"
    name, scale = SCALES.get(forecast.unit, ("million calls", 1e6))
    if forecast.step_seconds:
        per = bill.usd_per(scale, forecast.units, forecast.step_seconds)
        text += f"; ${figure(per)} per {name}"
    # Last, since a narrow terminal cuts the line.
    return f"{text} ({bill.price_region}, {bill.price_as_of})" if bill.price_as_of else text


def energy(forecast: Forecast) -> str:
    """Kilowatt-hours per unit of work with the source of the watts; empty without watts."""
    bill = forecast.bill
    if bill.watts is None or not forecast.step_seconds:
        return ""
    name, scale = SCALES.get(forecast.unit, ("million calls", 1e6))
    kwh = bill.kwh_per(scale, forecast.units, forecast.step_seconds)
    kind = bill.watts_source.split(",")[0]
    return f"{figure(kwh)} kWh per {name} ({kind} {si(bill.watts, 'W')}, PUE {bill.pue:g})"


def figure(value: float | None) -> str:
    """Formats dollars and kilowatt-hours: three digits, no exponent."""
    if value is None:
        return figures.MISSING
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def notes(forecast: Forecast) -> list[str]:
    """Notes on what makes the time wrong or one-sided, slows it, or underlies its price; then those that change no figure."""
    assumed = [] if forecast.timeline is None else forecast.timeline.notes
    priced = [note for note in forecast.notes if note in assumed]
    others = [note for note in forecast.notes if note not in assumed]
    texts = [*forecast.cautions, *forecast.warnings, *priced, *others]
    if forecast.interval:
        texts.append(f"interval: {forecast.interval}")
    if forecast.timeline is not None and forecast.priced_fraction < 0.9995:
        texts.append(
            f"{figures.plural(len(forecast.unpriced), 'op')} without a rule, taken from bytes alone: {figures.percent(1 - forecast.priced_fraction)} of the step"
        )
    return texts


def compiler_text(forecast: Forecast) -> str:
    """Versions and seconds of the compile: ``libtpu 0.0.42.1, jax 0.10.2, from the store in 0.4 s``."""
    facts = forecast.compiler
    known = [name for name in ("libtpu", *PLUGINS, "jax") if name in facts.versions]
    parts = [f"{name} {facts.versions[name]}" for name in known]
    if parts:
        how = "from the store in" if facts.cached else "compiled in"
        parts.append(f"{how} {duration(facts.seconds or 0.0)}")
    return ", ".join(parts)


def compiler_advice(forecast: Forecast) -> str:
    """How a GPU that was compiled for as a CPU is compiled for itself; empty elsewhere."""
    on = forecast.on
    if on.platform != "gpu" or forecast.compiler.built_for != "cpu" or not advice(on):
        return ""
    return f"for {on.chip.name} itself: pip install 'systolic[{EXTRA}]'"


def flags_text(forecast: Forecast) -> str:
    """Compiler flags that differ from XLA's defaults, in few words."""
    return described(forecast.compiler.flags or [])


def axes_text(forecast: Forecast) -> str:
    """Mesh axes that split something: ``fsdp 4``."""
    axes = {
        name: size
        for name, size in forecast.layout.items()
        if isinstance(size, int) and not isinstance(size, bool) and size != 1
    }
    named = ("data", "pipeline", "fsdp", "expert", "context", "tensor", "accumulate")
    return " × ".join(f"{name} {axes[name]}" for name in named if name in axes)
