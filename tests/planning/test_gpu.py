"""GPUs beside TPUs: a roofline ranks them, and says that it is one."""

import pytest

from systolic.chips import slice
from systolic.compiling.gpu_compiler import compiler
from systolic.core.units import Origin
from systolic.job import Axis, Layout, Remat
from systolic.planning.analytic import analyse, facts_of
from systolic.planning.candidate import Candidate, sets_for
from systolic.planning.goal import Goal
from systolic.planning.notes import GpuTimes, after_search
from systolic.planning.plan import CompileDepth
from systolic.planning.search import Limits, Search
from systolic.planning.space import Freedom, candidates
from systolic.planning.variants import changes
from tests.planning.jobs import decoder_job


def test_what_only_tpus_have_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("systolic.compiling.gpu_compiler.compiler", lambda: None)
    job, on = decoder_job(), slice("8xh100")
    found = list(candidates(job, on, Freedom()))
    assert found
    assert Remat.offload not in {one.layout.remat for one in found}
    wanted = changes(job, found[0])
    assert not any(change.attention_block or change.flags.flags for change in wanted)


@pytest.mark.parametrize("known", [True, False])
def test_flags_are_tried_where_the_gpu_s_compiler_schedules(
    monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    monkeypatch.setattr(
        "systolic.compiling.gpu_compiler.compiler",
        lambda: "jax-cuda12-pjrt 0.10.2" if known else None,
    )
    for name in ("8xh100", "16xh200", "8xa100-80", "8xb200"):
        tried = [one.name for one in sets_for(slice(name))]
        overlapped = ["gpu-overlapped"] if "a100" in name else []  # by itself from Hopper on
        wanted = [*overlapped, "gpu-pipelined", "gpu-double-buffered"]
        assert tried == (wanted if known else [])
    assert not sets_for(slice("h100"))
    assert not [one for one in sets_for(slice("v5e-8")) if one.name.startswith("gpu")]


def test_a_mesh_axis_between_hosts_is_slower_than_one_inside() -> None:
    facts, on = facts_of(decoder_job()), slice("16xh100")

    def seconds(**ways: int) -> float:
        layout = Layout(remat=Remat.full, **ways).on(on.num_devices)
        one = Candidate(on=on, layout=layout, batch=64, precision=facts.job.precision)
        return analyse(facts, one).seconds_estimate

    assert seconds(data=4, tensor=4, fsdp=1) < seconds(data=1, tensor=16, fsdp=1)


def test_a_search_of_gpus_is_within_its_bounds() -> None:
    on = slice("2xh100")
    search = Search(
        facts=facts_of(decoder_job()),
        slices=[on],
        goal=Goal(units=1e9),
        freedom=Freedom(axes=frozenset({Axis.data, Axis.fsdp})),
        limits=Limits(programs=2, finalists=2, workers=2),
    )
    plan = search.run()
    assert plan.best is not None
    compiled = compiler() is not None
    depth = CompileDepth.schedule if compiled else CompileDepth.roofline
    assert [one.depth for one in plan.ranking] == [depth] * 2
    assert plan.to_json()["best"]["compile"] == depth.value
    noted = after_search(plan, [on], search.freedom, 2)
    assert [note.simulated for note in noted if isinstance(note, GpuTimes)] == [compiled]
    for one in plan.ranking:
        made = one.forecast
        assert made is not None
        assert made.memory is not None
        assert made.step_seconds is not None
        assert made.origin is (Origin.simulated if compiled else Origin.assumed)
        assert one.analysis.seconds_bound <= made.step_seconds
        assert one.analysis.bytes_bound <= made.memory.peak_bytes
