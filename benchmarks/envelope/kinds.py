"""The random plain functions of the envelope: kinds of functions with variants, and what each must do by hand."""

import itertools
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
import jax
import jax.numpy as jnp
from cases import whole_families
from jax import ShapeDtypeStruct, lax
from jax.sharding import PartitionSpec

from systolic.chips import known
from systolic.core.files import digest
from systolic.forecasting.function import Spread
from systolic.sim.rates import Rates, cores, vector_rate

BITS = {"float32": 32, "bfloat16": 16, "int32": 32, "int8": 8, "float64": 64, "int64": 64}


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a function has to do at least, counted by hand; per device."""

    flops: float = 0.0
    """On the matrix units, bf16."""
    bytes: float = 0.0
    """Of device memory."""
    granules: float = 0.0
    """Granules of device memory that lie apart."""
    table: float = math.inf
    """Bytes of the table that they are of: all of it is the most that is read."""
    compared: float = 0.0
    """Comparisons of elements, or other operations of one lane."""
    addresses: float = 0.0
    """Addresses that the scalar unit makes, one a cycle at best."""
    sent: float = 0.0
    """Bytes that a device sends, over all its links."""

    def seconds(self, rates: Rates) -> dict[str, float]:
        """Seconds of each at the documented rates."""
        link = rates.chip.ici_bytes_per_second_per_link or 1.0
        return {
            "flops": self.flops / rates.peaks["bf16"],
            "bytes": self.bytes / rates.hbm,
            "granules": min(self.granules * known(rates.chip, "hbm_granule_bytes"), self.table)
            / rates.hbm,
            "compared": self.compared / vector_rate(rates),
            "addresses": self.addresses / (rates.clock_hz * cores(rates)),
            "links": self.sent / (2 * rates.axes * link),
        }


@dataclass(frozen=True, kw_only=True)
class Case:
    """One function on one slice."""

    name: str
    kind: str
    member: str
    on: str
    options: Mapping[str, Any]
    function: Callable[..., Any]
    args: tuple[Any, ...]
    work: Work
    spread: Spread | None = None
    x64: bool = False
    least: float = 1.0
    """Least seconds over those of the base; 0 where it may be faster."""
    most: float = math.inf
    """Most, likewise."""
    bound: bool = False
    """Whether its time depends on data, so that the forecast must say it is a lower bound."""

    @property
    def key(self) -> str:
        """Names what is computed."""
        return digest([self.kind, self.on, dict(self.options), self.x64], length=16)


@dataclass(frozen=True)
class Member:
    """A variant of a family's options."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    least: float = 1.0
    most: float = math.inf
    x64: bool = False


def array(dims: Sequence[int], dtype: str = "float32") -> ShapeDtypeStruct:
    return ShapeDtypeStruct(tuple(dims), jnp.dtype(dtype))


def bytes_of(*dims_and_dtype: Any) -> float:
    *dims, dtype = dims_and_dtype
    return math.prod(dims) * BITS[dtype] / 8


# Kinds: options from a seed, variants, and what each is as a function

Built = tuple[Callable[..., Any], tuple[Any, ...], Work]


def loop(o: Mapping[str, Any]) -> Built:
    """A loop of matmuls, static however it is written."""
    d, trips, form = o["d"], o["trips"], o["form"]

    def scan(x: Any, w: Any) -> Any:
        return lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=trips)[0]

    def reverse(x: Any, w: Any) -> Any:
        return lax.scan(
            lambda c, i: (jnp.tanh(c @ w) + i, None),
            x,
            jnp.arange(trips, dtype=x.dtype),
            reverse=True,
        )[0]

    def fori(x: Any, w: Any) -> Any:
        return lax.fori_loop(3, trips + 3, lambda i, c: jnp.tanh(c @ w), x)

    def count_down(x: Any, w: Any) -> Any:
        return lax.while_loop(
            lambda s: s[0] > 0, lambda s: (s[0] - 1, jnp.tanh(s[1] @ w)), (trips, x)
        )[1]

    def nested(x: Any, w: Any) -> Any:
        def inner(c, _):
            return (
                lax.scan(lambda a, _: (jnp.tanh(a @ w), None), c, None, length=trips // 4)[0],
                None,
            )

        return lax.scan(inner, x, None, length=4)[0]

    forms = {
        "scan": scan,
        "reverse": reverse,
        "fori": fori,
        "count_down": count_down,
        "nested": nested,
    }
    made = (array((d, d)), array((d, d)))
    return forms[form], made, Work(flops=2.0 * d**3 * trips)


def data_loop(o: Mapping[str, Any]) -> Built:
    """A loop whose end is data: one turn at least."""
    d = o["d"]

    def halving(x: Any, w: Any) -> Any:
        return lax.while_loop(lambda c: jnp.sum(c) > 1.0, lambda c: jnp.tanh(c @ w) / 2, x)

    def bounded(x: Any, w: Any, n: Any) -> Any:
        return lax.fori_loop(0, n, lambda i, c: jnp.tanh(c @ w), x)

    made = (array((d, d)), array((d, d)))
    if o["form"] == "traced":
        return bounded, (*made, array((), "int32")), Work(flops=2.0 * d**3)
    return halving, made, Work(flops=2.0 * d**3)


def slices_in_loop(o: Mapping[str, Any]) -> Built:
    """A loop that reads a row block of a large array each turn."""
    rows, width, trips = o["rows"], o["width"], o["trips"]

    def function(x: Any) -> Any:
        def turn(i: Any, c: Any) -> Any:
            return c + lax.dynamic_slice(x, (i * rows, 0), (rows, width))

        return lax.fori_loop(0, trips, turn, jnp.zeros((rows, width), x.dtype))

    moved = bytes_of(rows * trips, width, "float32")
    return (
        function,
        (array((rows * trips, width)),),
        Work(bytes=moved, compared=rows * width * trips),
    )


def sort(o: Mapping[str, Any]) -> Built:
    """Sorts of one or several arrays, along any axis."""
    rows, n, dtype, extra, form = o["rows"], o["n"], o["dtype"], o["operands"] - 1, o["form"]
    dims = (n, rows) if o["axis"] == 0 else (rows, n)
    given = (array(dims, dtype), *(array(dims, "int32") for _ in range(extra)))

    def function(*keys: Any) -> Any:
        if form == "argsort":
            return jnp.argsort(keys[0], axis=o["axis"])
        if extra or form == "unstable":
            return lax.sort(keys, dimension=o["axis"], is_stable=form != "unstable", num_keys=1)
        return jnp.sort(keys[0], axis=o["axis"], descending=form == "descending")

    # log2 n! comparisons a row, and every array is read and written once.
    compared = rows * n * max(math.log2(n) - 1.45, 0.5)
    moved = 2 * (bytes_of(rows, n, dtype) + extra * bytes_of(rows, n, "int32"))
    return function, given, Work(compared=compared, bytes=moved)


def top_k(o: Mapping[str, Any]) -> Built:
    """The largest k of rows."""
    rows, n, k, dtype = o["rows"], o["n"], o["k"], o["dtype"]

    def exact(x: Any) -> Any:
        return lax.top_k(x, k)

    def approximate(x: Any) -> Any:
        return lax.approx_max_k(x, k)

    function = approximate if o["form"] == "approximate" else exact
    return (
        function,
        (array((rows, n), dtype),),
        Work(bytes=bytes_of(rows, n, dtype), compared=rows * n),
    )


def gather(o: Mapping[str, Any]) -> Built:
    """Rows, elements or sampled columns of a table by index."""
    table, width, count, dtype = o["table"], o["width"], o["count"], o["dtype"]
    dims = (table, width) if width > 1 else (table,)

    def function(t: Any, i: Any) -> Any:
        return jnp.take(t, i, axis=0, mode="clip")

    row = width * BITS[dtype] / 8
    # What comes out is written; of a table beyond vector memory each index reads its row, a granule at least.
    large = table * row > 2**27
    work = Work(
        bytes=count * row,
        granules=count if large else 0.0,
        table=table * row,
        addresses=count,
    )
    return function, (array(dims, dtype), array((count,), "int32")), work


def scatter(o: Mapping[str, Any]) -> Built:
    """Updates of a table by index: added, set, summed by segment, or an embedding's gradient."""
    table, width, count, form = o["table"], o["width"], o["count"], o["form"]
    dims = (table, width) if width > 1 else (table,)
    new = (count, width) if width > 1 else (count,)
    index, values = array((count,), "int32"), array(new)
    if form == "segment_sum":
        return (
            (lambda v, i: jax.ops.segment_sum(v, i, num_segments=table)),
            (values, index),
            Work(bytes=bytes_of(*new, "float32"), addresses=count),
        )
    if form == "gradient":
        loss = lambda t, i: (t[i] ** 2).sum()  # noqa: E731
        work = Work(
            bytes=bytes_of(*dims, "float32") + bytes_of(*new, "float32"), addresses=2 * count
        )
        return jax.grad(loss), (array(dims), index), work
    put = (lambda t, i, v: t.at[i].add(v)) if form == "add" else (lambda t, i, v: t.at[i].set(v))
    # The table is an argument that stays: it is copied.
    work = Work(bytes=2 * bytes_of(*dims, "float32"), addresses=count)
    return put, (array(dims), index, values), work


def cumulative(o: Mapping[str, Any]) -> Built:
    """Cumulative sums and their like."""
    rows, n, form, axis = o["rows"], o["n"], o["form"], o["axis"]
    dims = (n, rows) if axis == 0 else (rows, n)
    forms = {
        "sum": lambda x: jnp.cumsum(x, axis),
        "max": lambda x: lax.cummax(x, axis),
        "logsumexp": lambda x: lax.cumlogsumexp(x, axis),
        "associative": lambda x: lax.associative_scan(jnp.add, x, axis=axis),
    }
    work = Work(bytes=2 * bytes_of(rows, n, "float32"), compared=rows * n)
    return forms[form], (array(dims),), work


def pool(o: Mapping[str, Any]) -> Built:
    """Maximum or mean over windows, forward or with its gradient."""
    batch, side, channels, window = o["batch"], o["side"], o["channels"], o["window"]

    def forward(x: Any) -> Any:
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, window, window, 1), (1, 2, 2, 1), "SAME")

    dims = (batch, side, side, channels)
    function = jax.grad(lambda x: forward(x).sum()) if o["form"] == "gradient" else forward
    return (
        function,
        (array(dims),),
        Work(bytes=bytes_of(*dims, "float32"), compared=math.prod(dims)),
    )


def convolution(o: Mapping[str, Any]) -> Built:
    """Convolutions of images and of sequences."""
    batch, side, channels, kernel, dims = (
        o["batch"],
        o["side"],
        o["channels"],
        o["kernel"],
        o["dims"],
    )
    places = (side,) * dims
    x = array((batch, *places, channels), "bfloat16")
    w = array((*(kernel,) * dims, channels, channels), "bfloat16")
    form = ("NWC", "WIO", "NWC") if dims == 1 else ("NHWC", "HWIO", "NHWC")

    def function(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, (1,) * dims, "SAME", dimension_numbers=form)

    inside = (side - kernel + 1) ** dims
    work = Work(
        flops=2.0 * batch * inside * kernel**dims * channels**2,
        bytes=2 * bytes_of(batch, *places, channels, "bfloat16"),
    )
    return function, (x, w), work


def fft(o: Mapping[str, Any]) -> Built:
    """Fourier transforms."""
    rows, n, form = o["rows"], o["n"], o["form"]
    if form == "two":
        return jnp.fft.fft2, (array((rows, n, n), "complex64"),), Work(bytes=16.0 * rows * n * n)
    if form == "real":
        return jnp.fft.rfft, (array((rows, n)),), Work(bytes=8.0 * rows * n)
    function = jnp.fft.ifft if form == "inverse" else jnp.fft.fft
    return function, (array((rows, n), "complex64"),), Work(bytes=16.0 * rows * n)


def elementwise(o: Mapping[str, Any]) -> Built:
    """Arithmetic and a sum, in the types that x64 widens."""
    rows, n, form = o["rows"], o["n"], o["form"]
    dtype = o["dtype"]
    forms = {
        "softmax": lambda x: jax.nn.softmax(x.astype(jnp.float32)),
        "chain": lambda x: x * x + x,
        "total": lambda x: jnp.sum(x * x, axis=-1),
    }
    kept = {"total": 0.0, "softmax": bytes_of(rows, n, "float32")}
    out = kept.get(form, bytes_of(rows, n, dtype))
    return forms[form], (array((rows, n), dtype),), Work(bytes=bytes_of(rows, n, dtype) + out)


def randoms(o: Mapping[str, Any]) -> Built:
    """Random numbers from a key."""
    n, form = o["n"], o["form"]

    def function(data: Any) -> Any:
        key = jax.random.wrap_key_data(data, impl="rbg" if form == "bits" else "threefry2x32")
        if form == "bits":
            return jax.random.bits(key, (n,), "uint32")
        if form == "permutation":
            return jax.random.permutation(key, n)
        return jax.random.normal(key, (n // 128, 128))

    size = 4 if form == "bits" else 2
    return function, (array((size,), "uint32"),), Work(bytes=4.0 * n)


def collective(o: Mapping[str, Any]) -> Built:
    """One collective under shard_map, over all devices or one axis of two."""
    form, mib, axes, dtype = o["form"], o["mib"], o["axes"], o["dtype"]
    names = tuple(name for name, _ in axes)
    over = names if o["over"] == "all" else names[-1]
    n = math.prod(
        size for name, size in axes if name in (over if isinstance(over, tuple) else (over,))
    )
    devices = math.prod(size for _, size in axes)
    per = mib * 2**20 * 8 // BITS[dtype]
    rows = per // 1024 // (n if form == "gather" else 1)

    def inner(x: Any) -> Any:
        if form == "sum":
            return lax.psum(x, over)
        if form == "scatter":
            return lax.psum_scatter(x, over, tiled=True)
        if form == "gather":
            return lax.all_gather(x, over, tiled=True)
        if form == "exchange":
            return lax.all_to_all(x, over, 0, 0, tiled=True)
        return lax.ppermute(x, over, [(i, (i + 1) % n) for i in range(n)])

    spec = PartitionSpec(names)

    def function(x: Any) -> Any:
        return jax.shard_map(inner, in_specs=spec, out_specs=spec, check_vma=False)(x)

    whole = mib * 2.0**20
    sent = {"sum": 2 * (n - 1) / n, "permute": 1.0}.get(form, (n - 1) / n) * whole
    return function, (array((rows * devices, 1024), dtype),), Work(sent=sent, bytes=whole)


def sharded_step(o: Mapping[str, Any]) -> Built:
    """A scan of products whose parts are summed over the devices each turn."""
    d, trips, (axis, n), rows = o["d"], o["trips"], o["axes"][0], o["rows"]

    def inner(x: Any, w: Any) -> Any:
        def turn(c: Any, _: Any) -> Any:
            return lax.psum(jnp.tanh(c) @ w, axis).astype(c.dtype), None

        return lax.scan(turn, x, None, length=trips)[0]

    def function(x: Any, w: Any) -> Any:
        specs = (PartitionSpec(), PartitionSpec(None, None))
        return jax.shard_map(inner, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)(
            x, w
        )

    sent = 2 * (n - 1) / n * rows * d * 2.0 * trips
    work = Work(flops=2.0 * rows * d * d * trips, sent=sent)
    return function, (array((rows, d), "bfloat16"), array((d, d), "bfloat16")), work


@dataclass(frozen=True)
class Kind:
    """A kind of function: how it is built, how options are drawn, and its variants."""

    build: Callable[[Mapping[str, Any]], Built]
    draw: Callable[[random.Random], dict[str, Any]]
    members: Callable[[dict[str, Any]], list[Member]]
    slices: tuple[str, ...] = ("v5e-1", "v6e-1")
    bound: bool = False


def doubled(options: Mapping[str, Any], name: str, least: float = 1.0) -> Member:
    return Member(name, {name: 2 * options[name]}, least)


X64 = Member("x64", x64=True)

KINDS: dict[str, Kind] = {
    "loop": Kind(
        loop,
        lambda r: {
            "d": r.choice((512, 1024, 2048)),
            "trips": 4 * r.choice((5, 16, 64)),
            "form": r.choice(("scan", "reverse", "fori", "count_down", "nested")),
        },
        lambda o: [doubled(o, "trips", 1.7), X64, doubled(o, "d", 3.0)],
    ),
    "data_loop": Kind(
        data_loop,
        lambda r: {"d": r.choice((512, 1024)), "form": r.choice(("traced", "until"))},
        lambda o: [doubled(o, "d", 2.0), X64],
        bound=True,
    ),
    "slices_in_loop": Kind(
        slices_in_loop,
        lambda r: {
            "rows": 8 * r.choice((1, 4, 64)),
            "width": 128 * r.choice((1, 8)),
            "trips": r.choice((100, 1000)),
        },
        lambda o: [doubled(o, "trips", 1.8), doubled(o, "rows"), X64],
    ),
    "sort": Kind(
        sort,
        lambda r: {
            "rows": r.choice((1, 8, 128)),
            "n": 2 ** r.choice((10, 13, 16)),
            "dtype": r.choice(("float32", "int32", "bfloat16")),
            "operands": 1,
            "axis": r.choice((0, 1)),
            "form": r.choice(("plain", "argsort", "unstable", "descending")),
        },
        lambda o: [
            doubled(o, "n", 1.2),
            Member(
                "operands",
                {"operands": 3, "form": "unstable"},
                1.0 if o["form"] == "unstable" else 0.0,
            ),
            doubled(o, "rows", 1.0),
        ],
    ),
    "top_k": Kind(
        top_k,
        lambda r: {
            "rows": r.choice((16, 128)),
            "n": 2 ** r.choice((12, 15, 17)),
            "k": r.choice((1, 4, 16)),
            "dtype": r.choice(("float32", "bfloat16")),
            "form": "exact",
        },
        lambda o: [
            Member("k", {"k": 8 * o["k"]}),
            doubled(o, "n", 1.5),
            Member("approximate", {"form": "approximate"}, 0.0, 1.05),
        ],
    ),
    "gather": Kind(
        gather,
        lambda r: {
            **dict(
                zip(
                    ("table", "width"),
                    r.choice(((2**22, 128), (2**27, 1), (2**17, 1), (2**10, 1))),
                    strict=True,
                )
            ),
            "count": 2 ** r.choice((12, 16, 20)),
            "dtype": r.choice(("float32", "bfloat16", "int32")),
        },
        lambda o: [
            doubled(o, "count", 1.5),
            *(
                [Member("width", {"width": max(4 * o["width"], 128)})]
                if o["table"] <= 2**22
                else []
            ),
        ],
    ),
    "scatter": Kind(
        scatter,
        lambda r: {
            "table": 2 ** r.choice((10, 16, 20)),
            "width": r.choice((1, 128)),
            "count": 2 ** r.choice((12, 16, 19)),
            "form": r.choice(("add", "set", "segment_sum", "gradient")),
        },
        lambda o: [doubled(o, "count", 1.0), doubled(o, "table")],
    ),
    "cumulative": Kind(
        cumulative,
        lambda r: {
            "rows": r.choice((8, 256, 1024)),
            "n": 2 ** r.choice((10, 13)),
            "axis": r.choice((0, 1)),
            "form": r.choice(("sum", "max", "logsumexp", "associative")),
        },
        lambda o: [doubled(o, "n"), doubled(o, "rows")],
    ),
    "pool": Kind(
        pool,
        lambda r: {
            "batch": r.choice((8, 32)),
            "side": r.choice((56, 112)),
            "channels": r.choice((64, 128)),
            "window": r.choice((2, 3)),
            "form": r.choice(("forward", "gradient")),
        },
        lambda o: [doubled(o, "batch", 1.5), Member("window", {"window": 5})],
    ),
    "convolution": Kind(
        convolution,
        lambda r: {
            "batch": r.choice((8, 32)),
            "side": r.choice((28, 56)),
            "channels": r.choice((128, 256)),
            "kernel": r.choice((1, 3)),
            "dims": r.choice((1, 2)),
        },
        lambda o: [doubled(o, "batch", 1.0), doubled(o, "channels", 1.0)],
    ),
    "fft": Kind(
        fft,
        lambda r: {
            "rows": r.choice((16, 256)),
            "n": 2 ** r.choice((8, 10)),
            "form": r.choice(("plain", "inverse", "real", "two")),
        },
        lambda o: [doubled(o, "rows", 1.0), doubled(o, "n", 0.0)],
    ),
    "elementwise": Kind(
        elementwise,
        lambda r: {
            "rows": r.choice((512, 4096)),
            "n": r.choice((1024, 8192)),
            "dtype": r.choice(("float32", "bfloat16")),
            "form": r.choice(("softmax", "chain", "total")),
        },
        lambda o: [
            doubled(o, "rows", 1.5),
            X64,
            Member("wide", {"dtype": "float64"}, 1.0, x64=True),
        ],
    ),
    "random": Kind(
        randoms,
        lambda r: {
            "n": 2 ** r.choice((16, 20, 24)),
            "form": r.choice(("bits", "normal", "permutation")),
        },
        lambda o: [doubled(o, "n", 1.0), X64],
    ),
    "collective": Kind(
        collective,
        lambda r: {
            "form": "sum",
            "mib": r.choice((1, 16, 128)),
            "axes": r.choice(((("a", 8),), (("a", 2), ("b", 4)))),
            "dtype": r.choice(("float32", "bfloat16")),
            "over": r.choice(("all", "last")),
        },
        lambda o: [
            doubled(o, "mib", 1.0),
            Member("scatter", {"form": "scatter"}, 0.0, 1.1),
            Member("gather", {"form": "gather"}, 0.0, 1.4),
            Member("exchange", {"form": "exchange"}, 0.0),
            Member("permute", {"form": "permute"}, 0.0),
        ],
        ("v5e-8", "v6e-8"),
    ),
    "sharded_step": Kind(
        sharded_step,
        lambda r: {
            "d": r.choice((1024, 2048)),
            "rows": r.choice((256, 1024)),
            "trips": r.choice((8, 40)),
            "axes": (("a", 8),),
        },
        lambda o: [doubled(o, "trips", 1.8), X64, doubled(o, "rows", 1.0)],
        ("v5e-8", "v6e-8"),
    ),
}


def families(seed: int) -> Iterator[list[Case]]:
    """Families of all kinds in turn, without end, the same for the same seed and none twice."""
    seen: set[str] = set()
    for at in itertools.count():
        for name, kind in KINDS.items():
            for salt in range(100):
                pick = random.Random(
                    f"{seed}/{at}/{name}/{salt}" if salt else f"{seed}/{at}/{name}"
                )
                options, on = kind.draw(pick), pick.choice(kind.slices)
                members = [Member("base", least=0.0), *kind.members(options)]
                made = [case_of(f"{at:02d}-{name}", name, on, one, options) for one in members]
                if not seen & {case.key for case in made}:
                    break
            seen |= {case.key for case in made}
            yield made


def case_of(family: str, kind: str, on: str, member: Member, options: Mapping[str, Any]) -> Case:
    made = {**options, **member.options}
    function, args, work = KINDS[kind].build(made)
    axes = made.get("axes")
    spread = None
    if axes is not None:
        specs = (PartitionSpec(tuple(name for name, _ in axes)),) if kind == "collective" else None
        spread = Spread(mesh=dict(axes), in_specs=specs)
    return Case(
        name=f"{family}-{member.name}",
        kind=kind,
        member=member.name,
        on=on,
        options=made,
        function=function,
        args=args,
        work=work,
        spread=spread,
        x64=member.x64,
        least=member.least,
        most=member.most,
        bound=KINDS[kind].bound,
    )


def functions(count: int, seed: int) -> list[Case]:
    """The first ``count`` of them, whole families."""
    return whole_families(families(seed), count)
