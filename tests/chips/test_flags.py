"""The flags that all jobs on a chip share, and what ``--flags`` makes of them."""

import pytest

from systolic.chips import chip
from systolic.chips.flags import (
    SHARED,
    compile_options,
    described,
    merged,
    name_of,
    resolved,
    shared_flags,
    shared_set,
    spoken,
)
from systolic.core.errors import OptionError

TPUS = ("v2", "v3", "v4", "v5e", "v5p", "v6e", "tpu7x")
EINSUM = "--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000"
VMEM = "--xla_tpu_scoped_vmem_limit_kib=98304"


def test_each_flag_has_its_reason_and_evidence() -> None:
    for flag in SHARED:
        assert flag.why
        assert any(word in flag.evidence for word in ("measured on", "simulated", "results/"))
        assert set(flag.generations) <= {*TPUS, "cpu"}
        ((name, value),) = compile_options([flag.text], "tpu").items()
        assert f"--{name}={value}" == flag.text
    for name in TPUS:
        texts = [flag.text for flag in shared_flags(chip(name))]
        assert EINSUM in texts
        assert len({name_of(text) for text in texts}) == len(texts)
    assert not shared_flags(chip("h100"))
    # On a CPU those of convolutional networks alone.
    assert all(flag.convolutional for flag in shared_flags(chip("cpu")))
    assert not shared_set(None, "cpu", convolutional=False)
    assert len(shared_set(None, "cpu", convolutional=True)) == 2
    assert not shared_set(None, "gpu", convolutional=True)
    assert shared_set(chip("v6e"), "tpu", convolutional=True) == [*resolved("", chip("v6e"))]
    assert resolved("", chip("cpu")) == ()
    assert spoken((), chip("cpu")) == ""


@pytest.mark.parametrize(
    ("given", "flags"),
    [
        ("", (EINSUM, VMEM)),
        ("none", ()),
        ("--xla_tpu_x=1", (EINSUM, VMEM, "--xla_tpu_x=1")),
        (
            "--xla_tpu_scoped_vmem_limit_kib=65536",
            (EINSUM, "--xla_tpu_scoped_vmem_limit_kib=65536"),
        ),
        ("none --xla_tpu_x=1", ("--xla_tpu_x=1",)),
    ],
)
def test_given_flags_add_to_the_shared_ones_or_replace_them(
    given: str, flags: tuple[str, ...]
) -> None:
    made = resolved(given, chip("v6e"))
    assert made == flags
    assert set(resolved(spoken(made, chip("v6e")), chip("v6e"))) == set(made)


def test_the_shared_set_needs_no_word() -> None:
    assert spoken((EINSUM, VMEM), chip("v6e")) == ""
    assert spoken((), chip("v6e")) == "none"
    assert spoken((EINSUM, VMEM, "--xla_a=1"), chip("v6e")) == "--xla_a=1"
    assert spoken((), chip("cpu")) == ""


def test_what_a_plan_was_made_with_takes_the_place_of_the_shared_set() -> None:
    assert resolved("", chip("v6e"), ["--xla_a=1"]) == ("--xla_a=1",)
    assert resolved("--xla_b=1", chip("v6e"), ["--xla_a=1"]) == ("--xla_a=1", "--xla_b=1")


@pytest.mark.parametrize("given", ["xla_tpu_x=1", "--", "off", "none x"])
def test_a_word_that_is_no_flag_is_one_line(given: str) -> None:
    with pytest.raises(OptionError, match="flags begin with two dashes") as raised:
        resolved(given, chip("v6e"))
    assert "\n" not in str(raised.value)


def test_options_of_a_program() -> None:
    assert compile_options(["--xla_a=1", "--xla_b"], "tpu") == {"xla_a": "1", "xla_b": "true"}
    assert compile_options(["--xla_b=false"], "cpu") == {"xla_b": "False"}
    with pytest.raises(OptionError, match="LIBTPU_INIT_ARGS"):
        compile_options(["--megascale_port=1"], "tpu")


def test_of_two_values_the_last_counts() -> None:
    assert merged(["--a=1", "--b=1"], ["--a=2"]) == ("--a=2", "--b=1")


def test_in_few_words() -> None:
    assert described([EINSUM, "--xla_a=1"]) == "no windowed einsums, --xla_a=1"
    assert described([]) == ""
    many = [f"--xla_{letter}=1" for letter in "abcd"]
    assert described([*many, VMEM]) == (
        "96 MiB of VMEM for a fusion, --xla_a=1, --xla_b=1, 2 more flags"
    )
