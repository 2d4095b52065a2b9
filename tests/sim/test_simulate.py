from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from systolic.chips import slice
from systolic.core.units import Origin
from systolic.hlo import Module, parse
from systolic.hlo.loops import counts_of
from systolic.sim.asynchronous import COLLECTIVES
from systolic.sim.estimate import F32_OPERANDS, slowdown_of
from systolic.sim.incomplete import BYTES
from systolic.sim.rates import rates_of
from systolic.sim.simulate import TURN_SECONDS, _Order, simulate
from systolic.sim.timeline import PricedBy, Resource, Span, Timeline
from tests.recorded import hlo as recorded

BIG = "f32[1024,1024]{1,0:T(8,128)}"
PART = "f32[512,1024]{1,0:T(8,128)}"


def run(body: str, before: str = "", on: str = "v5e-4") -> Timeline:
    text = f"HloModule m, is_scheduled=true, num_partitions=4\n\n{before}ENTRY %main () -> f32[] {{\n{body}\n}}\n"
    return simulate(parse(text), slice(on))


def of(timeline: Timeline, name: str, lane: str = "core") -> Span:
    (found,) = [s for s in timeline.spans if s.name == name and s.lane == lane]
    return found


# An op that no rule knows takes the compiler's cycles as they are, whatever its bytes and FLOPs allow.
COMPUTE = f"""\
%compute (p: f32[1024,1024]) -> f32[1024,1024] {{
  %p = {BIG} parameter(0)
  ROOT %n = {BIG} custom-call(%p), custom_call_target="Opaque"
}}

"""
MATMUL = COMPUTE.replace(
    'custom-call(%p), custom_call_target="Opaque"',
    "dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
)


def busy(name: str, operand: str, cycles: int) -> str:
    return f'  %{name} = {BIG} fusion(%{operand}), kind=kLoop, calls=%compute, backend_config={{"estimated_cycles":"{cycles}"}}'


def test_cycles_are_seconds_of_the_clock() -> None:
    timeline = run(f"  %x = {BIG} parameter(0)\n" + busy("f", "x", 150_000), COMPUTE)
    assert timeline.seconds == pytest.approx(150_000 / 1.5e9)
    assert timeline.origin is Origin.simulated


def test_a_matmul_takes_its_cycles_within_what_its_units_need() -> None:
    def seconds(cycles: int) -> float:
        return run(f"  %x = {BIG} parameter(0)\n" + busy("f", "x", cycles), MATMUL).seconds

    rates = rates_of(slice("v5e-4"))
    slow = slowdown_of("v5e")
    # Read once, written once.
    memory = slow.memory * 2 * 2**22 / rates.hbm
    matrix = slow.matrix * F32_OPERANDS * 2 * 1024**3 / rates.peak("bf16")
    assert seconds(20_000) == pytest.approx(20_000 / 1.5e9)
    assert seconds(1_000) == pytest.approx(memory)
    assert seconds(10_000_000) == pytest.approx(matrix + slow.unhidden * memory, rel=0.01)


def test_a_sentinel_is_no_estimate() -> None:
    timeline = run(f"  %x = {BIG} parameter(0)\n" + busy("f", "x", 2**62), COMPUTE)
    # Read and written once at the most.
    assert timeline.seconds < 1e-3
    assert of(timeline, "f").priced_by is not PricedBy.cycles


GATHER = "replica_groups={{0,1}}, dimensions={0}"


def gathered(between: int) -> Timeline:
    return run(
        f"""\
  %x = {BIG} parameter(0)
  %y = {PART} parameter(1)
  %start = ({PART}, {BIG}) all-gather-start(%y), {GATHER}
{busy("f", "x", between)}
  %done = {BIG} all-gather-done(%start)""",
        COMPUTE,
    )


def test_what_compute_hides_is_not_waited_for() -> None:
    long, short = gathered(10_000_000), gathered(1_000)
    whole = of(long, "start", "ici").seconds
    assert long.seconds == pytest.approx(10_000_000 / 1.5e9)
    assert not [s for s in long.spans if s.opcode.startswith("wait")]
    wait = of(short, "start")
    assert wait.resource is Resource.ici
    assert short.seconds == pytest.approx(whole)
    assert wait.seconds == pytest.approx(whole - 1_000 / 1.5e9)


def test_a_synchronous_collective_stops_the_core() -> None:
    timeline = run(f"  %y = {PART} parameter(0)\n  %g = {BIG} all-gather(%y), {GATHER}")
    assert of(timeline, "g").seconds == pytest.approx(timeline.seconds)
    assert timeline.seconds == pytest.approx(of(gathered(1), "start", "ici").seconds)


THREADED = f"""\
%begin (p: f32[512,1024]) -> (f32[512,1024], f32[1024,1024], u32[]) {{
  %p = {PART} parameter(0)
  %g = {BIG} all-gather(%p), {GATHER}, frontend_attributes={{chain_id="0"}}
  ROOT %s = ({PART}, {BIG}, u32[]{{:S(2)}}) custom-call(%g), custom_call_target="AsyncCollectiveStart"
}}

%middle (p.1: f32[512,1024], q.1: f32[1024,1024], u.1: u32[], x.1: f32[1024,1024]) -> (f32[1024,1024], f32[512,1024], f32[1024,1024], u32[]) {{
  %p.1 = {PART} parameter(0)
  %q.1 = {BIG} parameter(1)
  %u.1 = u32[]{{:S(2)}} parameter(2)
  %x.1 = {BIG} parameter(3)
  %n.1 = {BIG} custom-call(%x.1), custom_call_target="Opaque"
  %g.1 = {BIG} all-gather(%p.1), {GATHER}, frontend_attributes={{chain_id="0"}}
  ROOT %t.1 = ({BIG}, {PART}, {BIG}, u32[]{{:S(2)}}) tuple(%n.1, %p.1, %g.1, %u.1)
}}

%end (p.2: f32[512,1024], q.2: f32[1024,1024], u.2: u32[]) -> f32[1024,1024] {{
  %p.2 = {PART} parameter(0)
  %q.2 = {BIG} parameter(1)
  %u.2 = u32[]{{:S(2)}} parameter(2)
  %g.2 = {BIG} all-gather(%p.2), {GATHER}, frontend_attributes={{chain_id="0"}}
  ROOT %d = {BIG} custom-call(%p.2, %q.2, %g.2, %u.2), custom_call_target="AsyncCollectiveDone"
}}

"""


def threaded(cycles: int) -> Timeline:
    return run(
        f"""\
  %x = {BIG} parameter(0)
  %y = {PART} parameter(1)
  %start = ({PART}, {BIG}, u32[]{{:S(2)}}) fusion(%y), kind=kCustom, output_to_operand_aliasing={{{{0}}: (0, {{}})}}, calls=%begin
  %a = {PART} get-tuple-element(%start), index=0
  %b = {BIG} get-tuple-element(%start), index=1
  %c = u32[]{{:S(2)}} get-tuple-element(%start), index=2
  %work = ({BIG}, {PART}, {BIG}, u32[]{{:S(2)}}) fusion(%a, %b, %c, %x), kind=kOutput, output_to_operand_aliasing={{{{1}}: (0, {{}}), {{2}}: (1, {{}}), {{3}}: (2, {{}})}}, calls=%middle, backend_config={{"estimated_cycles":"{cycles}"}}
  %a2 = {PART} get-tuple-element(%work), index=1
  %b2 = {BIG} get-tuple-element(%work), index=2
  %c2 = u32[]{{:S(2)}} get-tuple-element(%work), index=3
  ROOT %done = {BIG} fusion(%a2, %b2, %c2), kind=kCustom, output_to_operand_aliasing={{{{}}: (1, {{}})}}, calls=%end""",
        THREADED,
    )


@pytest.mark.parametrize("cycles", [1_000, 10_000_000])
def test_a_collective_threaded_through_compute_is_one_collective_beside_it(cycles: int) -> None:
    timeline, plain = threaded(cycles), gathered(cycles)
    # Compute carries all but a quarter at each end, where the gather has so few steps.
    alone = of(plain, "start", "ici").seconds
    assert timeline.seconds == pytest.approx(max(alone, cycles / 1.5e9 + alone / 2))
    waits = [s.seconds for s in timeline.spans if s.opcode == "wait all-gather"]
    assert waits[0] == pytest.approx(alone / 4)
    assert waits[1] >= alone / 4 * (1 - 1e-9)
    assert of(timeline, "work").seconds == pytest.approx(cycles / 1.5e9)
    assert len([s for s in timeline.spans if s.lane == "ici"]) == 1


def test_copies_share_the_rate_not_the_latency() -> None:
    starts = "\n".join(
        f"  %s{n} = ({BIG[:-1]}S(1)}}, {BIG}, u32[]{{:S(2)}}) copy-start(%x)" for n in range(8)
    )
    ends = "\n".join(f"  %d{n} = {BIG[:-1]}S(1)}} copy-done(%s{n})" for n in range(8))
    timeline = run(f"  %x = {BIG} parameter(0)\n{starts}\n{ends}")
    moved = 8 * 2**22 / slice("v5e-4").chip.hbm_bytes_per_second
    assert moved < timeline.seconds < 1.2 * moved + 2e-6


LOOP = f"""\
%body (s: (s32[], f32[1024,1024])) -> (s32[], f32[1024,1024]) {{
  %s = (s32[], {BIG}) parameter(0)
  %i = s32[]{{:T(128)S(6)}} get-tuple-element(%s), index=0
  %v = {BIG} get-tuple-element(%s), index=1
{busy("f", "v", 30_000)}
  %one = s32[] constant(1)
  %j = s32[]{{:T(128)S(6)}} add(%i, %one)
  ROOT %o = (s32[], {BIG}) tuple(%j, %f)
}}

%condition (c: (s32[], f32[1024,1024])) -> pred[] {{
  %c = (s32[], {BIG}) parameter(0)
  %k = s32[] get-tuple-element(%c), index=0
  %end = s32[] constant(COUNT)
  ROOT %less = pred[] compare(%k, %end), direction=LT
}}

"""


def looped(count: int) -> Timeline:
    return run(
        f"""\
  %x = {BIG} parameter(0)
  %zero = s32[] constant(0)
  %first = (s32[], {BIG}) tuple(%zero, %x)
  ROOT %loop = (s32[], {BIG}) while(%first), condition=%condition, body=%body""",
        COMPUTE + LOOP.replace("COUNT", str(count)),
    )


@pytest.mark.parametrize("count", [1, 7])
def test_loops_multiply(count: int) -> None:
    timeline = looped(count)
    loop = of(timeline, "loop")
    assert loop.repeat == count
    turn = sum(span.seconds for span in loop.inside if span.lane == "core") + TURN_SECONDS
    assert timeline.seconds == pytest.approx(count * turn)
    assert sum(n for span, n in timeline.leaves() if span.name == "f") == count


def test_a_loop_of_no_turns_takes_no_time() -> None:
    assert looped(0).seconds == 0


def test_offload_to_sparse_cores_runs_beside_the_core() -> None:
    before = f"""\
%offloaded (a: f32[1024,1024]) -> f32[1024,1024] {{
  %a = {BIG} parameter(0)
  ROOT %n = {BIG} negate(%a)
}}, execution_thread="sparsecore"

"""
    timeline = run(
        f"""\
  %x = {BIG} parameter(0)
  %start = (({BIG}), {BIG}, u32[]{{:S(8)}}) call-start(%x), async_execution_thread="sparsecore", to_apply=%offloaded
{busy("f", "x", 10_000_000)}
  ROOT %done = {BIG} call-done(%start)""",
        before + COMPUTE,
        on="v6e-4",
    )
    assert of(timeline, "start", "sparse").seconds > 0
    assert timeline.seconds == pytest.approx(of(timeline, "f").seconds)


def test_what_no_rule_prices_is_listed() -> None:
    timeline = run(
        f'  %x = {BIG} parameter(0)\n  ROOT %c = {BIG} custom-call(%x), custom_call_target="Odd"'
    )
    assert [(one.name, one.label, one.why) for one in timeline.incomplete] == [("c", "Odd", BYTES)]
    assert of(timeline, "c").priced_by is PricedBy.nothing
    assert timeline.seconds > 0


CARRIED = "context-v5e-16"
"""Gathers begin before a loop of collective matmuls, are handed through its turns and end behind it."""


def simulated(name: str) -> Timeline:
    report = recorded.report(name)
    places = [tuple(place) for place in report["places"]]
    return simulate(recorded.module(name), slice(report["slice"]), places)


def levels(spans: Sequence[Span], seconds: float) -> Iterator[tuple[Sequence[Span], float]]:
    """The spans of the step and of each loop's turn, with its length."""
    yield spans, seconds
    for span in spans:
        if span.inside:
            yield from levels(span.inside, span.seconds / span.repeat)


@pytest.mark.parametrize("name", recorded.NAMES)
def test_the_core_runs_one_op_at_a_time(name: str) -> None:
    timeline = simulated(name)
    for spans, seconds in levels(timeline.spans, timeline.seconds):
        at = 0.0
        for span in (s for s in spans if s.lane == "core"):
            assert span.start >= at - 1e-12
            at = span.start + span.seconds
        assert at <= seconds + 1e-12


@pytest.mark.parametrize("name", recorded.NAMES)
def test_a_step_is_at_least_its_compute_and_each_transfer(name: str) -> None:
    timeline = simulated(name)
    core = sum(s.seconds * n for s, n in timeline.leaves() if s.lane == "core")
    assert timeline.seconds >= core * (1 - 1e-12)  # the sums round differently
    for spans, seconds in levels(timeline.spans, timeline.seconds):
        for span in spans:
            assert span.start + span.seconds <= seconds + 2e-6, span.name


@pytest.mark.parametrize("name", recorded.NAMES)
def test_matmuls_are_the_flops_that_the_compiler_counts(name: str) -> None:
    """XLA counts each loop once, elementwise ops too, and no Pallas kernel."""
    timeline = simulated(name)
    once = {
        s.name + s.source: s for s, _ in timeline.leaves() if s.priced_by is not PricedBy.kernel
    }
    found = sum(span.flops for span in once.values())
    said = recorded.report(name)["flops"]
    assert 0.95 * said < found <= said


@pytest.mark.parametrize("name", recorded.NAMES)
def test_full_rematerialisation_executes_more_than_the_model_has(name: str) -> None:
    report, timeline = recorded.report(name), simulated(name)
    done = sum(span.flops * times for span, times in timeline.leaves())
    model = report["program"]["model_flops"] / slice(report["slice"]).num_devices
    assert 1.1 * model < done < 2.5 * model


@pytest.mark.parametrize("name", [*recorded.NAMES, CARRIED])
def test_every_start_finds_its_done(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[str] = []
    run_all = _Order.run

    def run_and_look(self: _Order) -> object:
        answer = run_all(self)
        left.extend(self.pending)
        return answer

    monkeypatch.setattr(_Order, "run", run_and_look)
    timeline = simulated(name)
    assert any(span.lane == "ici" for span, _ in timeline.leaves())
    assert left == []


def begun(module: Module) -> Counter[str]:
    """Asynchronous gathers by the name of the fusion that starts them, with their runs in a step."""
    times = Counter({module.entry.name: 1})
    found: Counter[str] = Counter()
    todo, trips = [module.entry], counts_of(module).loops
    for computation in todo:
        for op in computation:
            if op.opcode == "while":
                body = module.callee(op, "body")
                times[body.name] += times[computation.name] * (int(trips[op.name].mean or 1))
                todo.append(body)
            elif op.opcode == "fusion":
                held = module.callee(op, "calls")
                if any(one.target == "AsyncCollectiveStart" for one in held):
                    found[op.name] += times[computation.name]
    return found


def test_a_gather_under_way_beside_a_loop_is_charged_once() -> None:
    module, timeline = recorded.module(CARRIED), simulated(CARRIED)
    expected = begun(module)
    assert sum(expected.values()) == 4
    transfers = Counter(
        {s.name: n for s, n in timeline.leaves() if s.opcode == "all-gather" and s.lane == "ici"}
    )
    assert transfers == expected
    # The fusions in the loops' turns repeat the gather's op; none of them is a transfer.
    inside = [name for name, c in module.computations.items() if name.startswith("async_coll")]
    assert len(inside) >= 4
    charged = {s.name for s, _ in timeline.leaves() if s.opcode in COLLECTIVES}
    assert not charged & {
        op.name for c in module.computations.values() for op in c if op.called("calls") in inside
    }


def test_a_fused_reduce_scatter_is_no_all_reduce() -> None:
    timeline = simulated("lm-context-v5e-4")
    (span,) = [s for s, _ in timeline.leaves() if s.name == "fusion.14"]
    assert span.opcode == "reduce-scatter"
    # bf16[1024,1024] over 2 x 2 chips: each sends 3/4 of it on, an all-reduce twice as much.
    assert span.bytes == 3 / 4 * 2 * 1024 * 1024
    assert span.seconds > span.bytes / rates_of(slice("v5e-4")).link
    # The compiler's own name for such a fusion, in a full compile.
    text = recorded.text("moe-2xv6e-4").splitlines()
    named = [line.split(" = ")[0].strip("% ") for line in text if "AllReduceScatterFusion" in line]
    spans = {s.name: s.opcode for s, _ in simulated("moe-2xv6e-4").leaves()}
    assert named
    assert {spans[name] for name in named} == {"reduce-scatter"}


def test_a_collective_on_sparse_cores_occupies_links() -> None:
    timeline = simulated("decode-tpu7x-8")
    kinds = {s.opcode: s for s, _ in timeline.leaves() if s.lane == "ici"}
    assert {"all-reduce", "all-gather"} <= set(kinds)
    assert {s.resource for s in kinds.values()} == {Resource.ici}
    # Two sums a layer over four devices in 2 x 1 chips, 64 KiB of which each sends 3/4 twice, by hand.
    on = slice("tpu7x-8")
    rates = rates_of(on)
    sums = [s for s, _ in timeline.leaves() if s.lane == "ici" and s.bytes == 2 * 3 / 4 * 65536]
    assert len(sums) == 3
    shared = 2 * 65536 * 3 / 4 / rates.link
    least = shared / (2 * rates.axes) + rates.collective_seconds
    assert all(least < s.seconds < 2 * shared + 20e-6 for s in sums)


def test_what_waits_for_a_gather_is_at_most_the_gather() -> None:
    timeline = simulated(CARRIED)
    gathers = sum(
        s.seconds * n for s, n in timeline.leaves() if s.lane == "ici" and s.opcode == "all-gather"
    )
    whole = 16 * 8192 * 256 * 2.0
    """Bytes of the layer's activations that each of the four gathers makes, keys and values first of all."""
    rates = rates_of(slice("v5e-16"))
    # A torus without wraparound: one way along x and along y, and the fixed costs.
    by_hand = whole * 15 / 16 / (2 * rates.link) + 6 * rates.hop_seconds + rates.collective_seconds
    assert gathers == pytest.approx(4 * by_hand, rel=1e-3)
    waits = sum(s.seconds * n for s, n in timeline.leaves() if s.opcode == "wait all-gather")
    links = sum(s.seconds * n for s, n in timeline.leaves() if s.lane == "ici")
    assert 0 < waits <= links


def test_a_transfer_beside_a_loop_has_the_links_that_the_loop_leaves() -> None:
    turn = f"""\
%body (s: (s32[], f32[512,1024])) -> (s32[], f32[512,1024]) {{
  %s = (s32[], {PART}) parameter(0)
  %i = s32[]{{:T(128)S(6)}} get-tuple-element(%s), index=0
  %v = {PART} get-tuple-element(%s), index=1
  %inner = {BIG} all-gather(%v), {GATHER}
  %one = s32[] constant(1)
  %j = s32[]{{:T(128)S(6)}} add(%i, %one)
  ROOT %o = (s32[], {PART}) tuple(%j, %v)
}}

"""
    timeline = run(
        f"""\
  %y = {PART} parameter(0)
  %zero = s32[] constant(0)
  %start = ({PART}, {BIG}) all-gather-start(%y), {GATHER}
  %first = (s32[], {PART}) tuple(%zero, %y)
  %loop = (s32[], {PART}) while(%first), condition=%condition, body=%body
  ROOT %done = {BIG} all-gather-done(%start)""",
        turn + "%condition" + LOOP.split("%condition", 1)[1].replace("COUNT", "3"),
    )
    alone = of(gathered(1), "start", "ici").seconds
    # Four gathers over one link, three of them in the loop.
    assert timeline.seconds == pytest.approx(4 * alone, rel=0.05)


def test_several_slices_number_their_own_devices() -> None:
    timeline = simulated("moe-2xv6e-4")
    by_kind = {}
    for span, _ in timeline.leaves():
        if span.priced_by is PricedBy.network and not span.opcode.startswith("wait"):
            by_kind.setdefault(span.opcode, set()).add(span.resource)
    # The exchange of experts stays inside a slice; only sends cross.
    assert by_kind["all-to-all"] == {Resource.ici}
    assert by_kind["send"] == by_kind["recv"] == {Resource.dcn}


def test_a_slice_fetched_into_vector_memory_takes_its_bytes() -> None:
    """An asynchronous slice is a transfer: never faster than the memory it reads."""
    wide, part = "s8[4096,4096]{1,0:T(8,128)(4,1)}", "s8[1024,4096]{1,0:T(8,128)(4,1)S(1)}"
    timeline = run(
        f"""\
  %x = {wide} parameter(0)
  %slice-start = (({wide}), {part}, s32[]) async-start(%x), calls=%held
  %slice-done = {part} async-done(%slice-start)""",
        f"%held (p: s8[4096,4096]) -> s8[1024,4096] {{\n  %p = {wide} parameter(0)\n"
        f"  ROOT %s = {part} slice(%p), slice={{[0:1024], [0:4096]}}\n}}\n\n",
    )
    assert of(timeline, "slice-start", "dma").seconds > 2**22 / rates_of(slice("v5e-4")).hbm


def test_transfers_and_ops_share_the_memory() -> None:
    """An op that reads device memory beside a transfer: the step takes the bytes of both."""
    inside = BIG.replace("T(8,128)", "T(8,128)S(1)")
    timeline = run(
        f"""\
  %x = {BIG} parameter(0)
  %y = {BIG} parameter(1)
  %copy-start = ({inside}, {BIG}, u32[]) copy-start(%y)
  %f = {BIG} fusion(%x), kind=kLoop, calls=%twice
  %copy-done = {inside} copy-done(%copy-start)""",
        f"%twice (p: f32[1024,1024]) -> f32[1024,1024] {{\n  %p = {BIG} parameter(0)\n"
        f"  ROOT %n = {BIG} add(%p, %p)\n}}\n\n",
    )
    rate = rates_of(slice("v5e-4")).hbm
    assert timeline.seconds > 3 * 2**22 / rate
    assert timeline.spans[-1].opcode == "wait memory"
