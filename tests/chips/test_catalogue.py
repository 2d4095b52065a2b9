"""Each number has a source, and numbers that physics ties together agree."""

import dataclasses
import subprocess
import sys
import tomllib
from importlib import resources
from pathlib import Path

import pytest

import systolic
from systolic.chips import Chip, ChipKind, by_device_kind, catalogue, chip, chips, usual
from systolic.chips.host import memory_bytes, model_name
from systolic.core.errors import NotFoundError, OptionError

TEXT = resources.files("systolic.chips").joinpath("catalogue.toml").read_text("utf-8")
TABLES = tomllib.loads(TEXT)
CATALOGUED = [known for known in chips() if known.kind is not ChipKind.cpu]


@pytest.fixture(autouse=True)
def _no_user_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SYSTOLIC_CATALOGUE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_names() -> None:
    assert [known.name for known in chips()] == [*TABLES["chips"], "cpu"]
    names = [n for known in chips() for n in (known.name, *known.aliases)]
    assert len(names) == len(set(names))
    assert chip("Trillium") is chip("v6e")


@pytest.mark.parametrize("known", chips(), ids=lambda known: known.name)
def test_every_number_is_sourced_and_dated(known: Chip) -> None:
    for name, figure in known.figures.items():
        assert figure.sources, name
        assert figure.as_of, name
        assert all(source.text for source in figure.sources), name
        if name.startswith("usd_per_chip_hour."):
            assert getattr(known.usd_per_chip_hour, name.split(".")[1]) == figure.value
            assert figure.region, name
        else:
            assert getattr(known, name) == figure.value


def test_every_key_of_the_file_is_used() -> None:
    figures = {f.name for f in dataclasses.fields(Chip)} | {"slices", "usd_per_chip_hour"}
    cited = {k for known in CATALOGUED for f in known.figures.values() for k in f.sources}
    standing_in = [figure for of in TABLES["usual"] for figure in usual(of).values()]
    used = {source.key for source in cited.union(*(f.sources for f in standing_in))}
    for rule in (known.slice_rule for known in CATALOGUED if known.slice_rule):
        used |= set(rule.sources)
    for name, table in TABLES["chips"].items():
        assert set(table) <= figures, name
    for name, table in TABLES["usual"].items():
        assert set(table) == set(usual(name)), name
    assert used == set(TABLES["sources"])


def test_what_stands_in_fits_the_chips() -> None:
    tpus = [known for known in CATALOGUED if known.kind is ChipKind.tpu]
    widths = {of.mxu_shape[0] for of in tpus if of.mxu_shape}
    assert set(usual("tpu")["mxu_widths"].value) == widths
    assert usual("tpu")["mxu_shape"].value == (min(widths),) * 2
    assert {of.vpu_shape for of in tpus if of.vpu_shape} == {usual("tpu")["vpu_shape"].value}
    rates = [k.dcn_bytes_per_second_per_host for k in tpus if k.dcn_bytes_per_second_per_host]
    assert usual("tpu")["dcn_bytes_per_second_per_host"].value == min(rates)


def test_a_number_of_a_chip_or_the_usual_one() -> None:
    assert catalogue.known(chip("v6e"), "pcie_bytes_per_second_per_chip") == 64e9
    assert catalogue.known(chip("v2"), "pcie_bytes_per_second_per_chip") == 16e9
    with pytest.raises(NotFoundError, match="no source gives pcie"):
        catalogue.known(chip("l4"), "pcie_bytes_per_second_per_chip")


@pytest.mark.parametrize("known", CATALOGUED, ids=lambda known: known.name)
def test_clock_and_matrix_units_explain_the_bf16_peak(known: Chip) -> None:
    if known.clock_hz is None or known.mxu_shape is None or known.num_mxu_per_core is None:
        pytest.skip("no clock or no matrix unit in the sources")
    assert known.num_cores is not None
    assert known.peak_bf16_flops_per_second is not None
    clock = dict(known.clock_hz_by_power_state).get(7, known.clock_hz)
    rows, columns = known.mxu_shape
    macs_per_cell = 2 if rows == 256 else 1
    peak = known.num_cores * known.num_mxu_per_core * rows * columns * 2 * clock * macs_per_cell
    assert peak == pytest.approx(known.peak_bf16_flops_per_second, rel=0.01)


@pytest.mark.parametrize("known", CATALOGUED, ids=lambda known: known.name)
def test_tensor_cores_explain_the_peak_of_a_gpu(known: Chip) -> None:
    """A multiprocessor's four tensor cores take a power of two of multiply-adds a cycle, at a clock below the highest."""
    if known.num_sms is None:
        pytest.skip("no multiprocessors in the sources")
    assert known.peak_bf16_flops_per_second is not None
    assert known.clock_hz is not None
    cycles = {"8": 1024, "9": 2048, "10": 4096}[(known.compute_capability or "").split(".")[0]]
    clock = known.peak_bf16_flops_per_second / (known.num_sms * cycles * 2)
    assert 0.85 * known.clock_hz < clock <= known.clock_hz * 1.001
    assert known.peak_tf32_flops_per_second == pytest.approx(
        known.peak_bf16_flops_per_second / 2, rel=0.01
    )


@pytest.mark.parametrize("known", CATALOGUED, ids=lambda known: known.name)
def test_orders_of_magnitude(known: Chip) -> None:
    """A slip of a unit (GB for B, per core for per chip) shows here."""
    bounds = {
        "peak_bf16_flops_per_second": (4e13, 3e15),
        "peak_int8_ops_per_second": (4e12, 1e16),
        "hbm_bytes": (8e9, 4e11),
        "driver_hbm_bytes": (8e9, 4e11),
        "l2_bytes": (2**25, 2**28),
        "shared_memory_bytes_per_sm": (2**17, 2**18),
        "num_sms": (50, 200),
        "hbm_bytes_per_second": (3e11, 1e13),
        "vmem_bytes_per_core": (2**24, 2**28),
        "ici_bytes_per_second_per_link": (4e10, 9e11),
        "clock_hz": (5e8, 3e9),
        "pcie_bytes_per_second_per_chip": (4e8, 3e11),
        "dcn_bytes_per_second_per_host": (1e10, 4e11),
        "host_dram_bytes": (1e11, 2e12),
        "usd_per_chip_hour.on_demand": (0.5, 20),
        "usd_per_chip_hour.spot": (0.1, 5),
        "tdp_watts": (1, 1500),
        "power_watts": (50, 1000),
    }
    for name, (low, high) in bounds.items():
        if name in known.figures:
            assert low <= known.figures[name].value <= high, name


def test_measured_is_below_peak() -> None:
    for known in CATALOGUED:
        pairs = (
            (known.measured_matmul_bf16_flops_per_second, known.peak_bf16_flops_per_second),
            (known.measured_hbm_copy_bytes_per_second, known.hbm_bytes_per_second),
            (known.usd_per_chip_hour.spot, known.usd_per_chip_hour.on_demand),
        )
        for low, high in pairs:
            assert low is None or (high is not None and low < high), known.name


def test_facts_that_the_compiler_depends_on() -> None:
    devices = {known.name: known.devices_per_chip for known in chips()}
    assert [devices[n] for n in ("v2", "v3", "v4", "v5e", "v5p", "v6e", "tpu7x")] == [
        *(2, 2, 1, 1, 1, 1, 2)
    ]
    assert [known.name for known in chips() if known.megacore] == ["v4", "v5p"]
    assert chip("v5e").vmem_bytes_per_core == 128 * 2**20
    assert chip("v3").peak_bf16_flops_per_second == 123e12


def test_source_says_where_a_number_is_from() -> None:
    figure = chip("v5e").source("hbm_bytes")
    assert figure.value == 16 * 2**30
    assert figure.unit == "B"
    assert "docs.cloud.google.com" in str(figure.sources[0])
    with pytest.raises(NotFoundError, match="no source gives cmem_to_vmem_bytes_per_second of v5e"):
        chip("v5e").source("cmem_to_vmem_bytes_per_second")
    with pytest.raises(NotFoundError, match="did you mean hbm_bytes"):
        chip("v5e").source("hbm_byte")
    with pytest.raises(NotFoundError, match="did you mean v5e"):
        chip("v5ee")


def test_by_device_kind() -> None:
    assert by_device_kind("TPU v5 lite") is chip("v5e")
    assert by_device_kind("TPU v5") is chip("v5p")
    assert by_device_kind("NVIDIA H200") is chip("h200")
    assert by_device_kind("NVIDIA GeForce RTX 3090") is None
    assert by_device_kind("") is None


def test_the_cpu_at_hand(tmp_path: Path) -> None:
    known = chip("cpu")
    assert known.peak_bf16_flops_per_second is None
    assert known.host_vcpus is not None
    assert known.host_vcpus >= 1
    assert known.hbm_bytes == memory_bytes() > 2**28
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Sample CPU @ 2 GHz\n")
    assert model_name(info) == "Sample CPU @ 2 GHz"
    assert model_name(tmp_path / "absent")


def _user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    monkeypatch.setenv("SYSTOLIC_CATALOGUE", str(path))
    return path


def test_a_user_file_replaces_what_it_names(monkeypatch, tmp_path: Path) -> None:
    before = chip("v5e")
    path = _user(
        monkeypatch,
        tmp_path,
        "[chips.v5e]\npower_watts = 90\n"
        "usd_per_chip_hour.on_demand = { value = 0.95, region = 'ours', as_of = 2026-11-01 }\n"
        "[chips.tpu7x.usd_per_chip_hour]\ncommitted = 7.5\n",
    )
    after = chip("v5e")
    assert after.power_watts == 90
    assert after.usd_per_chip_hour.on_demand == 0.95
    assert after.usd_per_chip_hour.spot == before.usd_per_chip_hour.spot
    assert after.source("hbm_bytes") == before.source("hbm_bytes")
    figure = after.source("usd_per_chip_hour.on_demand")
    assert str(path) in str(figure.sources[0])
    assert (figure.region, figure.as_of) == ("ours", "2026-11-01")
    assert chip("tpu7x").usd_per_chip_hour.committed == 7.5
    assert systolic.slice("tpu7x-8").usd_per_hour.committed == 30


def test_the_usual_place_of_the_user_file(tmp_path: Path) -> None:
    place = tmp_path / ".config" / "systolic" / "catalogue.toml"
    place.parent.mkdir(parents=True)
    place.write_text("[chips.v6e]\npower_watts = 1\n")
    assert chip("v6e").power_watts == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[chips.v5ee]\npower_watts = 1", "did you mean v5e?"),
        ("[chips.v5e]\npower_wats = 1", "did you mean power_watts?"),
        ("[chips.v5e]\nhbm_bytes = 1", "cannot be replaced"),
        ("[chips.v5e.usd_per_chip_hour]\nspott = 1", "did you mean usd_per_chip_hour.spot?"),
        ("[chips.v5e]\nusd_per_chip_hour = 1", "does not exist"),
        ("[chips.v5e]\npower_watts = 'much'", "give a number"),
        ("[chips.v5e]\npower_watts = -3", "at least 0"),
        ("[chips.v5e]\npower_watts = true", "give a number"),
        ("[chips.v5e]\npower_watts = nan", "give a number"),
        ("chips = 3", "is not a table"),
        ("[chips]\nv5e = 3", "is not a table"),
        ("[prices]\nv5e = 1", "go under [chips.NAME]"),
        ("[chips.v5e", "not readable as TOML"),
    ],
)
def test_a_mistake_in_the_user_file_is_one_line(monkeypatch, tmp_path, text, words) -> None:
    path = _user(monkeypatch, tmp_path, text)
    with pytest.raises(OptionError) as caught:
        chips()
    assert words in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_user_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYSTOLIC_CATALOGUE", "/nowhere/at/all.toml")
    with pytest.raises(NotFoundError, match="correct or unset it"):
        chips()


def test_import_loads_no_array_library() -> None:
    code = "import sys, systolic; systolic.slice('v5e-16'); print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
