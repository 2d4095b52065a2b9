import dataclasses
import json

import pytest

from systolic.core.errors import LayoutError
from systolic.job import Axis, Layout, Remat, Residual


@pytest.mark.parametrize(
    ("given", "made"),
    [
        (Layout(), Layout(data=2, fsdp=16)),
        (Layout(fsdp=16), Layout(data=2, fsdp=16)),
        (Layout(fsdp=-1, tensor=4), Layout(data=2, fsdp=4, tensor=4)),
        (Layout(data=4), Layout(data=4, fsdp=8)),
        (Layout(data=-1, fsdp=8), Layout(data=4, fsdp=8)),
        (Layout(slices=Axis.fsdp), Layout(fsdp=32, slices=Axis.fsdp)),
        (
            Layout(slices=Axis.pipeline),
            Layout(pipeline=2, fsdp=16, slices=Axis.pipeline),
        ),
    ],
)
def test_two_slices_hold_a_copy_each_unless_told_otherwise(given: Layout, made: Layout) -> None:
    definite = given.on(32, 2)
    assert definite == made
    definite.check_slices(2)


def test_one_slice_has_no_copies() -> None:
    assert Layout().on(16) == Layout(fsdp=16) == Layout().on(16, 1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            Layout(fsdp=8),
            r"\(fsdp 8\) is for 8 devices, but 16 are available; choose axes whose product is 16, or set one to -1 to take",
        ),
        (
            Layout(fsdp=8, tensor=4),
            "is for 32 devices, but 16 are available; choose axes whose product is 16",
        ),
        (Layout(fsdp=1), "all axes 1.* is for 1 device, but 16 are available"),
        (Layout(tensor=3), "needs a multiple of 3 devices, but 16 are available"),
    ],
)
def test_a_layout_of_another_size_says_so(given: Layout, said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        given.on(16)


def test_a_layout_that_leaves_no_place_for_the_slices_says_which_axis_crosses() -> None:
    made = Layout(fsdp=32).on(32, 2)
    with pytest.raises(LayoutError, match=r"layout.data 1 is not a multiple of the 2 slices"):
        made.check_slices(2)


def test_the_record_of_a_layout_has_every_field() -> None:
    made = Layout(tensor=2, residual=Residual.embed, saved_names=("out",)).to_json()
    assert set(made) == {field.name for field in dataclasses.fields(Layout)}
    assert list(made)[:6] == [axis.value for axis in Axis]
    assert (made["tensor"], made["residual"], made["saved_names"]) == (2, "embed", ["out"])
    assert json.loads(json.dumps(made)) == made


@pytest.mark.parametrize(("pipeline", "batch", "count"), [(1, 64, 0), (4, 4, 4), (4, 64, 8)])
def test_microbatches_are_two_a_stage_where_the_batch_allows_it(
    pipeline: int, batch: int, count: int
) -> None:
    assert Layout(pipeline=pipeline, fsdp=1).num_microbatches(batch) == count
    assert Layout(pipeline=4, fsdp=2).num_microbatches(8) == 4


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (
            Layout(remat_names=("query",)),
            "layout.remat-names has no effect here; leave it out, or set --layout.remat",
        ),
        (Layout(saved_names=("query",)), "layout.saved-names has no effect here"),
        (
            Layout(microbatches=4),
            "layout.microbatches has no effect here; leave it out, or set --layout.pipeline",
        ),
    ],
)
def test_a_field_without_effect_names_what_it_needs(layout: Layout, said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        layout.check_effects()
    Layout(remat=Remat.offload, remat_names=("query",), saved_names=("key",)).check_effects()


def test_an_activation_is_moved_or_kept() -> None:
    with pytest.raises(
        LayoutError, match="both have query; an activation is either offloaded or saved"
    ):
        Layout(remat=Remat.offload, remat_names=("query",), saved_names=("query",))
