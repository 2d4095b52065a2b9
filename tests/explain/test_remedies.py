"""Changes that are tried: each divides, differs from what there is, and says when training would notice."""

import pytest

from systolic.chips import slice
from systolic.cli.command import changed, command
from systolic.explain.ladder import difference
from systolic.explain.remedies import Change, Remedy, base_of, changes
from systolic.job import Layout, Remat
from systolic.plan import facts_of
from systolic.plan.space import check
from tests.plan.jobs import decoder_job


@pytest.mark.parametrize("experts", [1, 4])
@pytest.mark.parametrize("on", ["v5e-16", "v6e-8", "v5p-8"])
def test_changes_divide_and_differ(on: str, experts: int) -> None:
    job = decoder_job(experts=experts, layout=Layout(remat=Remat.full, accumulate=2))
    facts = facts_of(job)
    base = base_of(facts, slice(on))
    found = changes(facts, base)
    texts = [change.text for change in found]
    assert len(set(texts)) == len(texts)
    assert len({change.candidate for change in found}) == len(found)
    for change in found:
        assert change.candidate != base
        assert check(job, change.candidate) is None
        same = change.candidate.batch == base.batch and change.candidate.precision is base.precision
        assert change.same_result == same
    for start in ("remat full", "accumulate 2 -> 1", "fsdp", "flags", "batch", "attention block"):
        assert any(text.startswith(start) for text in texts), start
    # What training would notice is not what is tried first.
    assert found[0].same_result


def test_a_remedy_says_what_became_of_it() -> None:
    facts = facts_of(decoder_job())
    base = base_of(facts, slice("v5e-16"))
    change = Change(text="x", candidate=base)

    def remedy(gain: float | None, problem: str = "") -> str:
        return Remedy(
            change=change,
            step_seconds=1.0,
            units_per_second=1.0,
            need_bytes=14 * 2**30,
            have_bytes=16 * 2**30,
            gain=gain,
            problem=problem,
        ).verdict

    assert remedy(0.111) == "+11.1% (fits, 14.00 GiB of 16.00 GiB)"
    assert remedy(-0.02).startswith("-2.0%")
    assert remedy(0.001).startswith("no gain")
    assert remedy(None).startswith("does not fit")
    assert remedy(None, "the compiler died") == "the compiler died"


def test_the_command_replaces_what_was_typed() -> None:
    typed = [
        "--model.layers",
        "4",
        "--batch-per-device",
        "8",
        "--layout.fsdp=4",
        "--layout.remat-names",
        "a",
        "b",
        "--sequence",
        "128",
    ]
    settings = {"layout.fsdp": 16, "layout.remat_names": ("query", "key"), "batch": 64}
    assert command("train", "lm", typed, settings) == (
        "systolic train lm --model.layers 4 --sequence 128 --layout.fsdp 16 --layout.remat-names query key --batch 64"
    )


def test_a_default_takes_away_what_was_typed() -> None:
    assert command("train", "lm", ["--layout.data", "4"], {"layout.data": 1}) == "systolic train lm"


def test_settings_that_are_defaults_are_not_typed() -> None:
    base = base_of(facts_of(decoder_job()), slice("v5e-16"))
    assert changed(base.settings(decoder_job())) == {"layout.fsdp": 16, "batch": 64}


def test_a_difference_names_what_changed() -> None:
    base = base_of(facts_of(decoder_job()), slice("v5e-16"))
    assert difference(base.layout, base) == "the same layout"
    other = Layout(data=2, fsdp=8, remat=Remat.full)
    assert difference(other, base) == "data 2 -> 1, fsdp 8 -> 16, remat full -> none"
