"""Tables of the catalogue: all chips, one chip with its sources, one slice."""

from math import prod

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from systolic.chips.command import Catalogue, ChipEntry
from systolic.chips.record import Chip, ChipKind, Figure
from systolic.chips.slices import Slice, named_slices
from systolic.core.units import GIB, gibibytes, si

WIDTH = 100


def print_entry(entry: Catalogue | ChipEntry | Slice) -> None:
    """Prints a table of the catalogue, of a chip or of a slice."""
    console = Console(width=WIDTH, highlight=False)
    if isinstance(entry, Catalogue):
        console.print(_all_chips(entry))
    elif isinstance(entry, ChipEntry):
        console.print(_one_chip(entry))
    else:
        console.print(_one_slice(entry))


def _all_chips(catalogue: Catalogue) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("chip")
    for title in ("bf16\nTFLOP/s", "8-bit\nTOP/s", "memory", "memory\nGB/s", "links\nGB/s"):
        table.add_column(title, justify="right")
    for title in ("power\nW", "$/h\ndemand", "$/h\nspot"):
        table.add_column(title, justify="right")
    table.add_column("slices")
    for known in catalogue.chips:
        table.add_row(
            known.name,
            _scaled(known.peak_bf16_flops_per_second, 1e12),
            _scaled(_peak_of_8_bits(known), 1e12),
            "-" if known.hbm_bytes is None else _bytes(known.hbm_bytes),
            _scaled(known.hbm_bytes_per_second, 1e9),
            _links(known),
            _power(known),
            _price(known.usd_per_chip_hour.on_demand),
            _price(known.usd_per_chip_hour.spot),
            _range(known),
        )
    foot = "Power: mean in use, or TDP (t). Links: one way. - : no source. More GPUs by whole hosts: 16xh100. "
    path = catalogue.user_file
    where = f"Your prices and power: {path}" if path else "systolic chips NAME shows the sources."
    return Group(table, Text(foot + where, style="dim"))


def _peak_of_8_bits(known: Chip) -> float | None:
    """Peak in fp8 or int8, the faster one: Blackwell Ultra has little int8."""
    peaks = (known.peak_int8_ops_per_second, known.peak_fp8_flops_per_second)
    return max((peak for peak in peaks if peak is not None), default=None)


def _one_chip(entry: ChipEntry) -> RenderableType:
    known = entry.chip
    kinds = f"JAX says {known.device_kind}" if known.device_kind else ""
    megacore = "megacore (two cores, one device)" if known.megacore else ""
    facts = (
        known.kind.value,
        kinds,
        megacore,
        f"native {', '.join(known.native) or '-'}",
        *known.aliases,
    )
    head = Text(f"{known.name}  {known.title}", style="bold")
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("field", no_wrap=True)
    table.add_column("value", no_wrap=True, justify="right")
    table.add_column("source", overflow="fold")
    table.add_column("date", no_wrap=True)
    for name, figure in known.figures.items():
        keys = " ".join(source.key for source in figure.sources)
        table.add_row(name, _value(figure), keys, figure.as_of)
    parts: list[RenderableType] = [head, Text("; ".join(filter(None, facts))), Text(""), table]
    notes = {n: "; ".join(filter(None, (f.region, f.note))) for n, f in known.figures.items()}
    parts += _listing("Notes", {n: note for n, note in notes.items() if note})
    cited = {s.key: f"{s} ({s.as_of})" for f in known.figures.values() for s in f.sources}
    parts += _listing("Sources", dict(sorted(cited.items())))
    if entry.flags:
        parts.append(Text("\nCompiler flags of every job; --flags=none leaves them out", "bold"))
    for flag in entry.flags:
        parts += [Text(flag.text), *(Padding(t, (0, 0, 0, 2)) for t in (flag.why, flag.evidence))]
    named = [f"{s.name} {'x'.join(map(str, s.topology))}" for s in entry.slices]
    if known.kind is ChipKind.gpu:
        hosts = [f"{n * (known.chips_per_host or 1)}x{known.name}" for n in (2, 3)]
        named.append(f"{', '.join(hosts)} … by whole hosts")
    if known.slice_rule is not None and known.slice_rule.note:
        named.append(f"({known.slice_rule.note})")
    if named:
        parts += [Text("\nSlices", style="bold"), Text(", ".join(named))]
    return Group(*parts)


def _listing(title: str, rows: dict[str, str]) -> list[RenderableType]:
    if not rows:
        return []
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows.items():
        table.add_row(name, text)
    return [Text(f"\n{title}", style="bold"), table]


def _hosts(on: Slice) -> str:
    """Number of hosts; of eight chips that are one machine, with the other way in which Google has them."""
    bounds = on.chips_per_host_bounds
    chips_per_slice = on.num_chips // on.num_slices
    if bounds is None or on.num_hosts > on.num_slices or prod(bounds) == chips_per_slice:
        return f"{on.num_hosts}"
    pools = f"GKE also has pools of {chips_per_slice // prod(bounds)} machines of {prod(bounds)}"
    return f"{on.num_hosts}, with all {chips_per_slice} chips of a slice ({pools})"


def _one_slice(on: Slice) -> RenderableType:
    shape = "x".join(map(str, on.topology))
    wrapped = [str(size) for size, around in zip(on.topology, on.wrap, strict=True) if around]
    price = on.usd_per_hour
    rows = {
        "chip": f"{on.chip.name}  {on.chip.title}",
        "chips": f"{on.num_chips}",
        "JAX devices": f"{on.num_devices}",
        "hosts": _hosts(on),
        "slices": f"{on.num_slices}",
        "topology": shape + (f", wraps {' and '.join(wrapped)}" if wrapped else ", no wraparound"),
        "memory": "-" if on.hbm_bytes is None else gibibytes(on.hbm_bytes),
        "bf16 peak": _peak(on),
        "price": " ".join(
            f"${value:,.2f}/h {kind.replace('_', ' ')}"
            for kind, value in price.to_json().items()
            if value is not None
        )
        or "- (no source; set it in your catalogue, see systolic chips --help)",
        "power": _slice_power(on),
    }
    if on.topology_name is not None and on.chips_per_host_bounds is not None:
        bounds = "x".join(map(str, on.chips_per_host_bounds))
        rows["libtpu"] = f"{on.topology_name}, {on.chip_config_name}, {bounds} chips per host"
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows.items():
        table.add_row(name, text)
    cited = [f for n, f in on.chip.figures.items() if n.startswith(("usd_", "power_watts"))]
    sources = {f.field: f"{'; '.join(map(str, f.sources))} {f.region} ({f.as_of})" for f in cited}
    return Group(Text(on.name, style="bold"), table, *_listing("Sources", sources))


def _peak(on: Slice) -> str:
    peak = on.chip.peak_bf16_flops_per_second
    return "-" if peak is None else si(peak * on.num_chips, "FLOP/s")


def _slice_power(on: Slice) -> str:
    if on.power_watts is not None:
        return f"{on.power_watts / 1e3:,.2f} kW in use, hosts not counted"
    if on.tdp_watts is not None:
        return f"{on.tdp_watts / 1e3:,.2f} kW TDP, hosts not counted"
    return "-"


def _value(figure: Figure) -> str:
    value = figure.value
    if isinstance(value, tuple):
        pairs = value and isinstance(value[0], tuple)
        if not pairs:
            return "x".join(map(str, value))
        unit = figure.unit if figure.unit == "Hz" else ""
        return "\n".join(f"{key}: {si(item, unit, digits=4)}" for key, item in value)
    if figure.unit == "B":
        return _bytes(value)
    if figure.unit == "$/h":
        return f"${value:g}/h"
    if figure.unit in ("B/s", "FLOP/s", "OP/s", "Hz"):
        return si(value, figure.unit, digits=4)
    if figure.unit == "s":
        return f"{value * 1e6:g} us"
    if isinstance(value, str):
        return value
    return f"{value:g} {figure.unit}".strip()


def _bytes(value: int) -> str:
    for unit, size in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if size <= value < 1024 * size and value % size == 0:
            return f"{value // size} {unit}"
    return si(value, "B", digits=4)


def _scaled(value: float | None, unit: float) -> str:
    return "-" if value is None else f"{value / unit:,.0f}"


def _links(known: Chip) -> str:
    rate = known.ici_bytes_per_second_per_link
    if rate is None:
        return "-"
    return f"{known.num_ici_links}x{rate / 1e9:.0f}" if known.num_ici_links else f"{rate / 1e9:.0f}"


def _power(known: Chip) -> str:
    if known.power_watts is not None:
        return f"{known.power_watts:.0f}"
    return "-" if known.tdp_watts is None else f"{known.tdp_watts:.0f}t"


def _price(usd: float | None) -> str:
    return "-" if usd is None else f"{usd:.2f}"


def _range(known: Chip) -> str:
    names = [named.name for named in named_slices(known)]
    if not names:
        return "-"
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
