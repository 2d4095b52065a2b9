"""Changes that are tried: each divides, differs from what there is, and says when training would notice."""

import random

import pytest

from systolic import recipes
from systolic.chips import slice
from systolic.chips.flags import merged, name_of, resolved
from systolic.core.errors import RunError
from systolic.core.option_words import option_words
from systolic.job import Layout, Remat
from systolic.planning.analytic import facts_of
from systolic.planning.candidate import (
    SETS,
    Change,
    ChangedPart,
    compatible,
    joined,
    layout_change,
    together,
)
from systolic.planning.fit_ladder import difference
from systolic.planning.remedies import Remedy, base_of, changes, training_changes, try_all
from systolic.planning.space import check
from tests.planning import fabricated
from tests.planning.evaluators import AnsweringEvaluator
from tests.planning.jobs import decoder_job


@pytest.mark.parametrize("experts", [1, 4])
@pytest.mark.parametrize("on", ["v5e-16", "v6e-8", "v5p-8"])
def test_changes_divide_and_differ(on: str, experts: int) -> None:
    job = decoder_job(experts=experts, layout=Layout(remat=Remat.full, accumulate=2))
    facts = facts_of(job)
    base = base_of(facts, slice(on))
    found = changes(facts, base)
    texts = [change.text(base) for change in found]
    assert len(set(texts)) == len(texts)
    made = {change: change.on(base) for change in found}
    assert len(set(made.values())) == len(found)
    for change, candidate in made.items():
        assert candidate != base
        assert check(job, candidate) is None
        assert (candidate.batch, candidate.precision) == (base.batch, base.precision)
        assert change.same_result
    for start in ("remat full", "accumulate 2 -> 1", "fsdp", "flags", "attention block"):
        assert any(text.startswith(start) for text in texts), start
    # What training would notice is tried apart.
    others = training_changes(facts, base)
    assert others
    for change in others:
        assert not change.same_result
        assert check(job, change.on(base)) is None


V6E = "--xla_tpu_scoped_vmem_limit_kib=122880"


@pytest.mark.parametrize("given", ["", "none", V6E])
def test_changes_add_to_the_flags_that_are_set(given: str) -> None:
    on = slice("v6e-8")
    facts = facts_of(decoder_job())
    base = base_of(facts, on, resolved(given, on.chip))
    names = {name_of(flag) for flag in base.compiler_flags}
    found = changes(facts, base)
    for change in found:
        candidate = change.on(base)
        flags = candidate.compiler_flags
        assert names <= {name_of(flag) for flag in flags}
        assert candidate.flags is base.flags or set(flags) != set(base.compiler_flags)


def test_what_a_plan_has_tuned_is_not_advised_again() -> None:
    on = slice("v6e-8")
    facts = facts_of(decoder_job())
    tuned = joined(*(one for one in SETS if one.name in ("v6e-dense", "whole-gathers")))
    base = base_of(facts, on, merged(resolved("", on.chip), tuned.flags))
    assert not [one for one in changes(facts, base) if ChangedPart.flags in one.touches]


def test_what_is_compiled_has_the_flags_that_are_shown() -> None:
    evaluator = AnsweringEvaluator(lambda *_: RunError("none"))
    on = slice("v6e-8")
    facts = facts_of(decoder_job())
    base = base_of(facts, on, resolved("", on.chip))
    wanted = changes(facts, base)
    fabricated_forecast = fabricated.tried(fabricated.candidate("v6e-8", fsdp=8), 1.0, 8.0).forecast
    assert fabricated_forecast is not None
    made = try_all(facts, fabricated_forecast, base, wanted, evaluator)
    asked = [one.compiler_flags for one in evaluator.asked]
    assert {tuple(one.to_json({})["flags"]) for one in made} == set(asked)
    shared = set(resolved("", on.chip))
    assert all({name_of(f) for f in shared} <= {name_of(f) for f in flags} for flags in asked)


@pytest.mark.parametrize("seed", range(3))
def test_remedies_come_in_the_order_of_the_changes(seed: int) -> None:
    late = random.Random(seed)
    facts = facts_of(decoder_job())
    base = base_of(facts, slice("v6e-8"))
    wanted = changes(facts, base)[:6]
    made = fabricated.tried(fabricated.candidate("v6e-8", fsdp=8), 1.0, 8.0).forecast
    assert made is not None
    told: list[str] = []
    evaluator = AnsweringEvaluator(
        lambda job, one, full: fabricated.tried(one, 0.5, 8.0).forecast,
        lambda _: late.randrange(6),
    )
    found = try_all(facts, made, base, wanted, evaluator, lambda one, *_: told.append(one.text))
    assert told[:6] == [one.text(base) for one in wanted]
    # A batch of twice as many gains most, the others the same: these stay in the order in which they were asked for.
    same = [one.text for one in found if one.same_result and one.text in told[:6]]
    assert same == [one.text(base) for one in wanted if one.same_result]


def test_sets_that_help_add_up() -> None:
    on = slice("v5e-16")
    facts = facts_of(decoder_job())
    base = base_of(facts, on, resolved("", on.chip))
    sets = [one for one in SETS if one.name in ("async-gather", "host-overlap")]

    found = compatible([Change(flags=one) for one in sets])
    assert len(found) == 2
    wanted = {*base.base, *sets[0].flags, *sets[1].flags}
    assert set(together(base, found).compiler_flags) == wanted


def test_of_two_changes_of_a_kind_only_the_first_is_kept() -> None:
    first, second = layout_change(remat=Remat.full), layout_change(remat=Remat.minimal)
    assert compatible([first, layout_change(accumulate=2), second]) == [
        first,
        layout_change(accumulate=2),
    ]
    meshes = layout_change(fsdp=8, tensor=2), layout_change(data=2, fsdp=8)
    assert compatible(meshes) == [meshes[0]]


def test_a_remedy_says_what_became_of_it() -> None:
    facts = facts_of(decoder_job())
    base = base_of(facts, slice("v5e-16"))

    def remedy(gain: float | None, problem: str = "") -> str:
        return Remedy(
            text="x",
            candidate=base,
            step_seconds=1.0,
            units_per_second=1.0,
            need_bytes=14 * 2**30,
            have_bytes=16 * 2**30,
            gain=gain,
            problem=problem,
        ).verdict

    assert remedy(0.111) == "+11.1% tokens/s, 1.0 s a step (fits, 14.00 GiB of 16.00 GiB)"
    assert remedy(-0.02).startswith("-2.0%")
    assert remedy(0.001).startswith("no gain")
    assert remedy(None).startswith("does not fit")
    assert remedy(None, "the compiler died") == "the compiler died"


def test_settings_that_are_defaults_are_not_typed() -> None:
    base = base_of(facts_of(decoder_job()), slice("v5e-16"))
    words = option_words(recipes.find("lm").function, {}, base.settings(decoder_job()))
    assert words == ["--layout.fsdp", "16", "--batch", "64"]


def test_a_difference_names_what_changed() -> None:
    base = base_of(facts_of(decoder_job()), slice("v5e-16"))
    assert difference(base.layout, base) == "the same layout"
    other = Layout(data=2, fsdp=8, remat=Remat.full)
    assert difference(other, base) == "data 2 -> 1, fsdp 8 -> 16, remat full -> none"
