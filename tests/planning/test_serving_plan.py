"""Plans of servers: floors by hand, the search over steps of known seconds, and one with the compiler."""

import html
import json
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import systolic
from systolic.chips import Slice, slice
from systolic.cli.main import VERBS, main
from systolic.cli.parse import parse
from systolic.core.errors import OptionError
from systolic.core.units import Origin
from systolic.forecasting.cost import bill_of
from systolic.forecasting.serving import demand
from systolic.forecasting.serving.capacity import ServerTimes
from systolic.forecasting.serving.demand import engine_state
from systolic.forecasting.serving.forecast import Load, ServingForecast, StepTimes
from systolic.forecasting.serving.server_steps import LeastServer
from systolic.job import Job, Layout
from systolic.job.serving_memory import ServingMemory
from systolic.planning import serving as serving_plan
from systolic.planning.display.serving import lines
from systolic.planning.goal import PriceTerm, hourly
from systolic.planning.serving import ServingPlan
from systolic.recipes.jobs import source_of

LOAD = Load(prompt_tokens=1000, output_tokens=1000, chunk=256)
SLOWER = 1.5
"""Seconds of a compiled step over its floor."""
SIMULATED = 1600
"""Requests that are simulated: a tenth, whose larger errors a plan adds as it does those of all."""


def least(model: str, on: str, **layout: int) -> LeastServer:
    """The floors of a published model."""
    chosen = Layout(**({"data": 1, "fsdp": 1} | layout))
    return LeastServer(job=source_of(model, {}).job, on=slice(on), load=LOAD, layout=chosen)


def test_floors_by_hand() -> None:
    """Llama 3.1 8B on one device: bytes of the weights but the embedding, and of 16 texts of 1,500 positions."""
    dense = least("llama-3.1-8b", "v6e-1")
    weights, position = 2 * 8_030_261_248, 2 * 32 * 8 * 128 * 2
    assert dense.weight_bytes() == pytest.approx(weights, rel=1e-4)
    assert dense.room == (dense.on.program_bytes - int(dense.weight_bytes())) // (2000 * position)
    read = weights - 2 * 128_256 * 4096 + 16 * 1500 * position
    assert dense.times().decode[16] == pytest.approx(read / 1638e9, rel=1e-3)
    # 256 tokens of a prompt take the weights' bytes longer than their FLOPs.
    flops = 256 * 2 * (8_030_261_248 - 2 * 128_256 * 4096)
    assert dense.times().chunk == pytest.approx(
        max((weights - 2 * 128_256 * 4096) / 1638e9, flops / 918e12), rel=0.01
    )


def test_floors_of_a_mixture_are_those_of_the_experts_that_are_read() -> None:
    mixture = least("qwen3-30b-a3b", "v6e-4", tensor=4)
    experts = 48 * 128 * 3 * 2048 * 768
    rest = 30_532_122_624 - experts
    assert mixture.weight_bytes() == pytest.approx(2 * 30_532_122_624 / 4, rel=0.01)
    times = mixture.times()
    chosen = 1 - (1 - 8 / 128) ** 16
    read = 2 * (rest - 151_936 * 2048 + chosen * experts) / 4 + 16 * 1500 * mixture.position_bytes
    sums = times.decode[16] - read / 1638e9
    assert 0 < sums < 97 * 15e-6  # two in each layer and one of the embedding
    # Split by number, a device reads its share of the experts and all of the rest.
    split = least("qwen3-30b-a3b", "v6e-4", expert=4)
    assert split.weight_bytes() == pytest.approx(2 * (rest + experts / 4), rel=0.01)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Compiled steps of known seconds, and the slices and tensor axes that were compiled."""
    seen: list[tuple[str, int]] = []

    def times(job: Job, on: Slice, load: Load, rows: Sequence[int], **_: Any) -> ServerTimes:
        server = LeastServer(job=job, on=on, load=load, layout=job.layout)
        floor = server.times()
        slower = {size: SLOWER * seconds for size, seconds in floor.decode.items()}
        seen.append((on.name, job.layout.tensor))
        memory = ServingMemory(
            capacity_bytes=on.program_bytes,
            weights_bytes=int(server.weight_bytes()),
            temporary_bytes=0,
            page_bytes=int(64 * server.position_bytes),
            page_size=64,
            replicas=job.layout.data,
        )
        return ServerTimes(
            forecast=ServingForecast(
                name=job.name,
                on=on,
                load=load,
                layout="",
                program="",
                origin=Origin.simulated,
                memory=memory,
                bill=bill_of(on),
            ),
            times=StepTimes(decode=slower, chunk=SLOWER * floor.chunk),
            floor=floor,
            room=memory.concurrency(load.tokens) // job.layout.data,
        )

    monkeypatch.setattr(serving_plan, "server_times", times)
    monkeypatch.setattr(demand, "SIMULATED", SIMULATED)
    monkeypatch.setattr(demand, "SIMULATED_MOST", SIMULATED)
    return seen


def planned(model: str = "llama-3.1-8b", on: str = "v6e,v5e", **options: Any) -> ServingPlan:
    """A plan for 100 requests a second of 1,000 + 1,000 tokens."""
    asked = {"requests_per_second": 100, "prompt_tokens": 1000, "output_tokens": 1000}
    limits = {"ttft": "1s", "tpot": "50ms", "finalists": 0}
    return systolic.plan_serving(model, on=on, **{**asked, **limits, **options})


def test_a_plan_takes_the_demand_at_the_least_cost(known: list[tuple[str, int]]) -> None:
    plan = planned()
    best = plan.best
    assert best is not None
    costs = [one.fleet.usd_per_hour or math.inf for one in plan.ranked]
    assert costs == sorted(costs)
    for one in plan.ranked:
        fleet, state = one.fleet, one.fleet.state
        assert one.compiled is fleet
        # Throughput times engines is the demand, and a replica fewer does not take it.
        assert fleet.replicas * fleet.engines * fleet.most_rate >= 100
        assert (fleet.replicas - 1) * fleet.engines * fleet.most_rate < 100
        assert state.requests_per_second * fleet.replicas * fleet.engines == pytest.approx(100)
        # Little's law: requests under way are the rate times the latency.
        latency = state.first_token_seconds + 999 * state.token_seconds
        assert state.requests == pytest.approx(state.requests_per_second * latency)
        assert state.late_first_token_seconds <= 1.0
        assert state.token_seconds <= 0.05
        assert state.most_requests <= one.room
        price = hourly(one.on, PriceTerm.on_demand)
        assert price is not None
        assert fleet.usd_per_hour == pytest.approx(fleet.replicas * price)
        tokens = 100 * 2000 * 3600
        assert fleet.usd_per_million_tokens == pytest.approx(fleet.replicas * price / tokens * 1e6)
        assert one.least.usd_per_hour is not None
        assert one.least.usd_per_hour <= fleet.usd_per_hour
    # What was left out is dearer at its floor, or beyond the number or the share of a slice.
    tried = {(one.on.name, one.layout.tensor) for one in plan.ranked}
    assert set(known) == tried
    assert len(tried) <= serving_plan.CANDIDATES


def test_what_is_dearer_at_its_floor_is_not_compiled(known: list[tuple[str, int]]) -> None:
    plan = planned(candidates=50)
    best = plan.best
    assert best is not None
    for one in plan.uncompiled:
        same = [other for other in plan.ranked if other.on == one.on]
        assert one.order >= best.order or len(same) == serving_plan.LAYOUTS
    assert known


def test_of_equal_dollars_the_one_with_the_most_headroom_is_the_answer(
    known: list[tuple[str, int]],
) -> None:
    """Whichever was compiled first: at 9.60 dollars an hour five layouts of v5e take it."""
    plan = planned(requests_per_second=20, output_tokens=300, candidates=50)
    best = plan.best
    assert best is not None
    equal = [one for one in [*plan.ranked, *plan.uncompiled] if one.cost == best.cost]
    assert len(equal) > 2
    assert best.fleet.headroom == max(one.fleet.headroom for one in equal)
    assert [one.order for one in plan.ranked] == sorted(one.order for one in plan.ranked)
    assert len(known) == len(plan.ranked)


def test_slices_of_a_chip_are_those_of_one_machine() -> None:
    found, larger = serving_plan._slices("v6e,v5e-4", 64, PriceTerm.on_demand)
    assert [on.name for on in found] == ["v6e-1", "v6e-4", "v6e-8", "v5e-4"]
    assert [on.name for on in larger] == ["v6e-16", "v6e-32", "v6e-64"]


def test_a_model_that_no_machine_holds_gets_several(known: list[tuple[str, int]]) -> None:
    """405 B parameters are 756 GiB, and eight chips of v6e have 250."""
    plan = planned("llama-3.1-405b", "v6e", max_chips=32, candidates=1)
    assert plan.best is not None
    assert plan.best.on.name == known[0][0] == "v6e-32"
    assert {one.name for one in plan.rejected} == {"v6e-1", "v6e-4", "v6e-8", "v6e-16"}
    assert plan.notes


def test_a_demand_of_almost_nothing_and_one_beyond_all_chips(
    known: list[tuple[str, int]], tmp_path: Path
) -> None:
    """A server that is idle nearly always, its words in the singular, and its commands."""
    asked = {"on": "v6e-1", "ttft": None, "tpot": None}
    plan = planned(
        "smollm2-135m", requests_per_second=0.001, **asked, weights="w8a8", kv_dtype="int8"
    )
    best = plan.best
    assert best is not None
    state = best.fleet.state
    assert state.first_token_seconds <= state.late_first_token_seconds
    shown = " ".join(" ".join(line.plain for line in lines(plan, 100)).split())
    assert "1 engine of one device, 1 chip: $" in shown
    assert "times more requests would be taken the engine: 0.001 requests a second" in shown
    assert "<0.01 texts under way (99 % of the time up to 1, room for" in shown
    assert not re.search(r"\b1 (chips|engines|rows|devices|hosts)\b", shown)
    sizes = "--layout.data 1 --layout.tensor 1 --rows 16 --context 2000 --chunk 256"
    assert plan.commands == [
        "hf download HuggingFaceTB/SmolLM2-135M --local-dir smollm2-135m",
        "systolic quantize smollm2-135m --to w8a8 --out smollm2-135m-w8a8 --calibrate TEXT",
        f"systolic serve smollm2-135m-w8a8 {sizes} --kv-dtype int8",
    ]
    for command, known_verb in zip(plan.commands[1:], ("quantize", "serve"), strict=True):
        verb, *words = shlex.split(command)[1:]
        assert verb == known_verb
        options = VERBS[verb].forms[0].options.read
        parse(options, words, f"systolic {verb}")  # raises for an option that the verb lacks
    (tmp_path / "config.json").write_text("{}")
    for name, folder in ((tmp_path, tmp_path), (tmp_path / "config.json", tmp_path), ("lm", "DIR")):
        renamed = replace(plan, name=str(name), weights="plain", cache="plain")
        assert renamed.commands == [f"systolic serve {folder} {sizes}"]
        told = "DIR is a run, a Bundle or a folder with the weights"
        assert any(told in line.plain for line in lines(renamed, 100)) == (name == "lm")
    known.clear()
    beyond = planned("smollm2-135m", requests_per_second=1e9, **asked)
    assert (beyond.best, beyond.commands, known) == (None, [], [])
    (refused,) = beyond.rejected
    assert re.match(r"1e\+09 requests a second take [\d,]+ chips at the least", refused.reason)


def test_a_slice_of_several_machines_is_taken_by_name_and_says_so(
    known: list[tuple[str, int]],
) -> None:
    plan = planned("llama-3.1-70b", "v6e-16", candidates=1)
    assert plan.notes == ["v6e-16 has 4 hosts, and systolic serve takes the devices of one machine"]
    assert known == [("v6e-16", plan.ranked[0].layout.tensor)]


@pytest.mark.slow
def test_spot_and_quantized_matrices_cost_less(
    known: list[tuple[str, int]],
) -> None:
    usual, spot = planned(on="v6e-8").best, planned(on="v6e-8", price="spot").best
    small = planned(on="v6e-8", weights="int8").best
    assert usual is not None
    assert spot is not None
    assert small is not None
    assert (spot.fleet.usd_per_hour or 0) < (usual.fleet.usd_per_hour or 0)
    assert (small.fleet.usd_per_hour or 0) < (usual.fleet.usd_per_hour or 0)
    assert known


def test_what_does_not_fit_and_what_is_too_slow_is_rejected_with_the_reason() -> None:
    plan = planned("llama-3.1-70b", "v5e-1,v6e-8,h100", tpot="0.1ms")
    assert plan.best is None
    reasons = {one.name: one.reason for one in plan.rejected}
    assert set(reasons) == {"v5e-1", "v6e-8", "h100"}
    assert reasons["v5e-1"].startswith("131.42 GiB of weights on one device leave no room")
    assert "above the limits of first token 1.0 s and per token 0.1 ms even" in reasons["v6e-8"]
    assert reasons["h100"].startswith("plan serve is for TPU slices")
    shown = [line.plain for line in lines(plan, 100)]
    assert "nothing that was tried takes this demand" in shown


def test_the_screen_and_the_json(known: list[tuple[str, int]], capsys: Any) -> None:
    words = "llama-3.1-8b --on v6e,v5e --requests-per-second 100 --prompt-tokens 1000 --output-tokens 1000"
    asked = ["plan", "serve", *words.split(), "--ttft", "1s", "--tpot", "50ms", "--finalists", "0"]
    assert main([*asked, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    best = made["ranked"][0]
    layout = best["layout"]
    assert best["chips"] == best["replicas"] * slice(best["slice"]).num_chips
    assert made["time_per_output_token_seconds"] == 0.05
    assert best["compiled"]
    assert main(asked) == 0
    shown = capsys.readouterr().out
    assert " ".join(shown.split()).startswith(
        "llama-3.1-8b for 100 requests a second of 1,000 + 1,000 tokens, first token 1.0 s and per"
    )
    texts = min(max(math.ceil(best["engine"]["most_requests"]), 16), best["room_per_engine"])
    sizes = f"--rows {texts} --context 2000 --chunk 256"
    # Names of hubs are not read: what is published is fetched first.
    run = [
        "run       hf download meta-llama/Llama-3.1-8B --local-dir llama-3.1-8b",
        f"          systolic serve llama-3.1-8b --layout.data {layout['data']} --layout.tensor {layout['tensor']} {sizes}",
    ]
    assert "\n".join(run) + "\n" in shown
    assert made["commands"] == [line.strip() for line in (run[0].removeprefix("run"), run[1])]
    assert "note  assumed: requests come by chance (Poisson)" in shown
    plan = planned()
    screen = [line.plain for line in lines(plan, 100)]
    assert max(len(line) for line in screen if "systolic serve" not in line) <= 100
    # One line of the tables is bold: the answer's.
    bold = [line.plain for line in lines(plan, 100) if str(line.style) == "bold"]
    assert [line.split()[0] for line in bold if line[:3] in ("v5e", "v6e")] == [best["slice"]]
    assert plan.uncompiled
    page = html.unescape(re.sub(r"<[^>]+>", "", plan._repr_html_()))
    assert all(line.strip() in page for line in screen)
    assert repr(plan).startswith(
        f"<ServingPlan of llama-3.1-8b: {best['replicas']:,} x {best['slice']}"
    )
    assert known


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"requests_per_second": 0}, "requests_per_second is 0.0; it must be above 0"),
        ({"ttft": "fast"}, "ttft is 'fast'; write a time such as 50ms"),
        ({"price": "free"}, "price is 'free'; it takes on-demand, spot, committed"),
        ({"weights": "int9"}, "weights is 'int9'"),
        ({"flags": "foo"}, "flags has 'foo'"),
        (
            {"model": "gpt2"},
            "are a context of 2000 and the model has positions for 1024 tokens; give",
        ),
        (
            {"model": "image", "path": "x", "classes": 3},
            "image is no language model; plan serve takes a decoder",
        ),
    ],
)
def test_mistakes_have_a_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as refused:
        planned(**options)
    assert message in str(refused.value)


@pytest.mark.slow
def test_a_plan_by_the_compiler_is_above_its_floors() -> None:
    """A small decoder on two slices of one chip: steps of the compiler's schedule."""
    pytest.importorskip("libtpu")
    job = source_of("llama-3.1-8b", {}).job
    sizes = {"layers": 2, "d_model": 512, "d_ff": 1024, "heads": 4, "kv_heads": 4, "vocab": 32_000}
    plan = systolic.plan_serving(
        replace(job, model=replace(job.model, **sizes)),
        on="v6e-1,v5e-1",
        requests_per_second=500,
        prompt_tokens=500,
        output_tokens=100,
        tpot="20ms",
        finalists=0,
    )
    assert plan.ranked
    for one in plan.ranked:
        assert one.forecast is not None
        for step in one.forecast.steps:
            assert step.floor_seconds is not None
            assert step.seconds > step.floor_seconds
        assert one.fleet.most_rate < one.least.most_rate
        # Beyond the largest step that was compiled nothing is guessed.
        state = engine_state(plan.demand.load, _times(one.forecast), one.fleet.most_rate * 0.999)
        assert state is not None


def _times(forecast: ServingForecast) -> StepTimes:
    decode = {step.rows: step.seconds for step in forecast.steps if step.tokens == 1}
    (chunk,) = [step.seconds for step in forecast.steps if step.tokens > 1]
    return StepTimes(decode=decode, chunk=chunk)
