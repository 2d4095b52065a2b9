"""Names become shapes by rule; the recorded table of slices is the judge."""

import csv
from math import prod
from pathlib import Path

import pytest

import systolic
from systolic.chips import ChipKind, chip, chips, named_slices
from systolic.chips.record import factorisations
from systolic.core.errors import NotFoundError

HERE = Path(__file__).resolve()
RECORDED = HERE.parents[1] / "recorded" / "tpu_slices.csv"
BESIDE = HERE.parents[3] / "shared" / "research" / "tpu_slices.csv"


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


ROWS = _rows(BESIDE if BESIDE.is_file() else RECORDED)
TPU_ROWS = [row for row in ROWS if row["platform"] == "tpu"]


def test_the_recorded_copy_is_the_table() -> None:
    assert _rows(RECORDED) == ROWS
    assert len(TPU_ROWS) == 223


@pytest.mark.parametrize("row", TPU_ROWS, ids=lambda row: row["name"])
def test_every_row_of_the_table(row: dict[str, str]) -> None:
    made = systolic.slice(row["name"])
    shape = tuple(int(axis) for axis in row["topology_name"].split(":")[1].split("x"))
    bounds = tuple(int(axis) for axis in row["chips_per_host_bounds"].split("x"))
    wrap = tuple(bool(int(axis)) for axis in row["wrap_xyz"].split(","))
    assert made.name == row["name"]
    assert made.platform == "tpu"
    assert made.topology == shape
    assert made.topology_name == row["topology_name"]
    assert made.chip_config_name == row["chip_config"]
    assert made.chips_per_host_bounds == bounds
    assert made.num_devices == int(row["devices"])
    assert made.num_chips == prod(shape)
    # Google rents the eight chips of v5e and v6e as one machine; larger slices are machines of four.
    one_machine = prod(shape) == 8 and made.chip.name in ("v5e", "v6e")
    assert made.num_hosts == (1 if one_machine else prod(shape) // prod(bounds))
    assert made.num_chips // made.num_hosts <= (made.chip.chips_per_host or 0)
    assert made.num_slices == 1
    assert (*made.wrap, False)[:3] == wrap


def test_named_slices_are_the_rows_and_no_others() -> None:
    made = {s.name for n in ("tpu7x", "v6e", "v5e", "v5p", "v4") for s in named_slices(chip(n))}
    assert made == {row["name"] for row in TPU_ROWS}


def test_the_gpu_machine_of_the_table() -> None:
    (row,) = [row for row in ROWS if row["platform"] == "gpu"]
    made = systolic.slice(row["name"])
    assert (made.platform, made.num_devices) == ("gpu", int(row["devices"]))
    assert made.name == "8xh100"


@pytest.mark.parametrize(
    ("name", "topology", "chips_", "devices", "hosts", "wrap"),
    [
        ("v2-8", (2, 2), 4, 8, 1, (False, False)),
        ("v3-8", (2, 2), 4, 8, 1, (False, False)),
        ("v2-512", (16, 16), 256, 512, 64, (True, True)),
        ("v3-32", (4, 4), 16, 32, 4, (False, False)),
        ("v3-1024", (16, 32), 512, 1024, 128, (False, True)),
        ("v3-2048", (32, 32), 1024, 2048, 256, (True, True)),
    ],
)
def test_v2_and_v3_count_tensorcores(name, topology, chips_, devices, hosts, wrap) -> None:
    made = systolic.slice(name)
    assert (made.topology, made.num_chips, made.num_devices) == (topology, chips_, devices)
    assert (made.num_hosts, made.wrap) == (hosts, wrap)


@pytest.mark.parametrize(
    ("given", "canonical"),
    [
        ("v5p:4x4x8", "v5p-256"),
        ("v5e:4x8", "v5e-32"),
        ("v5litepod-16", "v5e-16"),
        ("Ironwood-8", "tpu7x-8"),
        (" V5E-16 ", "v5e-16"),
        ("v5e:2x8", "v5e:2x8"),
        ("v5p:16x20x28", "v5p-17920"),
        ("v4:4x8x12", "v4:4x8x12"),
        ("1xv5e-16", "v5e-16"),
        ("h200", "h200"),
        ("1xh200", "h200"),
        ("cpu", "cpu"),
        ("a100-80", "a100-80"),
        ("2xa3", "16xh100"),
        ("8xa100", "8xa100-80"),
        ("a3-ultra", "8xh200"),
        ("2xa3-high", "2xa3-high"),
    ],
)
def test_one_slice_has_one_name(given: str, canonical: str) -> None:
    made = systolic.slice(given)
    assert made.name == canonical
    assert systolic.slice(canonical) == made


def test_multislice_counts_the_whole() -> None:
    one, two = systolic.slice("v5e-256"), systolic.slice("2xv5e-256")
    assert (two.num_slices, two.devices_per_slice) == (2, 256)
    assert two.topology == one.topology
    for field in ("num_chips", "num_devices", "num_hosts", "hbm_bytes", "power_watts"):
        assert getattr(two, field) == 2 * getattr(one, field)


def test_gpus_fill_hosts_and_cpus_are_virtual() -> None:
    assert [systolic.slice(n).num_hosts for n in ("h100", "8xh100", "16xh100")] == [1, 1, 2]
    virtual = systolic.slice("8xcpu")
    assert (virtual.num_devices, virtual.num_chips, virtual.num_hosts) == (8, 1, 1)
    assert virtual.platform == "cpu"


def test_machines_of_a_cloud_have_their_own_network() -> None:
    """Four cards of an A3 High carry 150 Gb/s each, 75 GB/s together, eight of an A3 Mega 200 each."""
    high, mega, other = (systolic.slice(n) for n in ("2xa3-high", "2xa3-mega", "16xh100"))
    rates = [s.chip.dcn_bytes_per_second_per_host for s in (high, mega, other)]
    assert rates == [75e9, 200e9, 400e9]
    assert [s.num_hosts for s in (high, mega, other)] == [2, 2, 2]
    assert high.chip.source("dcn_bytes_per_second_per_host").value == 75e9
    assert high.chip.name == "h100"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("v5e-15", "did you mean v5e-16?"),
        ("v5f-16", "did you mean v5e-16?"),
        ("2xv5e-15", "did you mean 2xv5e-16?"),
        ("v5p-12", "did you mean v5p-16?"),
        ("v4-768", "did you mean v4-1024?"),
        ("v5e", "say how many: v5e-1"),
        ("v5e:3x5", "each axis is even"),
        ("v5e:4x32", "an axis ends at 16"),
        ("v5e:4x4x4", "has 2 axes"),
        ("v5p:4x4x6", "multiples of 4"),
        ("v5p:32x32x32", "a pod ends at 8960 chips"),
        ("v5e:0x2", "at least 1 chip"),
        ("v5x:4x4", "did you mean v5e:4x4?"),
        ("h100-8", "did you mean 8xh100?"),
        ("9xh100", "did you mean 8xh100?"),
        ("0xcpu", "at least 1"),
        ("tpu8i", "has no slices"),
        ("edge_tpu", "has no slices"),
        ("v5p-9999999999999999999999", "did you mean v5p-17920?"),
        ("", "is not the name of a slice"),
        ("zebra", "a name is like v5e-16"),
        ("x" * 500, "is not the name of a slice"),
    ],
)
def test_a_wrong_name_is_one_line_with_a_way_out(name: str, words: str) -> None:
    with pytest.raises(NotFoundError) as caught:
        systolic.slice(name)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["-8xh100", "1.5xh100"])
def test_a_count_that_is_no_whole_number_is_named(name: str) -> None:
    with pytest.raises(NotFoundError, match=r"count that is no whole number .* as in 8xh100"):
        systolic.slice(name)


def test_suggested_names_exist() -> None:
    for known in chips():
        for number in range(1, 300) if known.slice_rule else ():
            try:
                systolic.slice(f"{known.name}-{number}")
            except NotFoundError as error:
                hint = str(error).split("did you mean ")[1].split("?")[0]
                assert systolic.slice(hint).chip is known


def test_price_and_power_follow_the_chip() -> None:
    made, one = systolic.slice("v5e-16"), chip("v5e")
    assert one.usd_per_chip_hour.on_demand is not None
    assert made.usd_per_hour.on_demand == 16 * one.usd_per_chip_hour.on_demand
    assert one.power_watts is not None
    assert made.power_watts == 16 * one.power_watts
    unknown = systolic.slice("tpu7x-8")
    assert unknown.power_watts is None
    assert unknown.usd_per_hour.to_json() == {"on_demand": None, "spot": None, "committed": None}


def test_factorisations_are_complete() -> None:
    for number in range(1, 61):
        found = set(factorisations(number, 3))
        ranges = range(1, number + 1)
        brute = {
            (a, b, number // (a * b))
            for a in ranges
            for b in ranges
            if number % (a * b) == 0 and a <= b <= number // (a * b)
        }
        assert found == brute


def test_every_sliceable_chip_lists_slices_that_parse() -> None:
    for known in chips():
        for made in named_slices(known):
            assert systolic.slice(made.name) == made
        if known.kind is ChipKind.edge:
            assert named_slices(known) == []


@pytest.mark.parametrize(
    ("name", "kind", "zone", "usd", "region"),
    [
        ("v6e-8", "spot", "us-east5-b", 10.208, "us-east5"),
        ("v5p-8", "spot", "us-east5-a", 5.2, "us-east5"),
        ("v5e-16", "on_demand", "europe-west4-b", 24.96, "europe-west4"),
        ("v6e-8", "on_demand", "asia-northeast1-b", 25.92, "asia-northeast1"),
        # The same in all regions of a country.
        ("v6e-8", "on_demand", "us-east5-b", 21.6, "us-east5"),
        ("v5e-16", "on_demand", "", 19.2, "us-central1"),
        ("v5e-16", "on_demand", "us-west9-a", 19.2, "us-central1"),
        ("v2-32", "on_demand", "europe-west4-a", 24.0, "europe-west4"),
        ("v2-8", "on_demand", "europe-west4-a", 4.95, "europe-west4"),
    ],
)
def test_prices_are_those_of_the_region(
    name: str, kind: str, zone: str, usd: float, region: str
) -> None:
    """Each as its source has it for the whole slice."""
    found, of, _ = systolic.slice(name).rate(kind, zone)
    assert (found, of) == (pytest.approx(usd), region)
    assert systolic.slice("v2-32").usd_per_hour.on_demand == 24.0
