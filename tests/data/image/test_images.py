"""Folders of pictures, made here with Pillow, as they are and packed."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from systolic.core.errors import DataError, NotFoundError
from systolic.data.image.images import INDEX, Images, listing, pack
from systolic.data.image.pictures import Augmentation, Crop, centre, crop, decode, random_box
from systolic.data.input_files import FILES
from systolic.job import OnError, Read, Split

CLASSES = ("bird", "cat", "dog")
COLOURS = {"bird": (250, 20, 20), "cat": (20, 250, 20), "dog": (20, 20, 250)}


def draw(folder: Path, count: int, start: int = 0) -> None:
    """``count`` pictures a class, of the class's colour and various sizes and formats."""
    for name in CLASSES:
        (folder / name).mkdir(parents=True)
        for index in range(start, start + count):
            size = (40 + 3 * index, 60 - 2 * index)
            suffix = (".png", ".jpg", ".JPEG")[index % 3]
            Image.new("RGB", size, COLOURS[name]).save(folder / name / f"{index}{suffix}")
        (folder / name / "notes.txt").write_text("not a picture")


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    draw(tmp_path / "plain", 10)
    return tmp_path / "plain"


def read(split: Split, **changes) -> Read:
    return Read(**{"split": split, "batch": 8, "shuffle": False, "epochs": 1, **changes})


def everything(data: Images, split: Split) -> tuple[np.ndarray, np.ndarray]:
    batches = list(data.open(read(split)))
    kept = np.concatenate([b["mask"] for b in batches]) > 0
    return tuple(np.concatenate([b[name] for b in batches])[kept] for name in ("image", "label"))


def test_a_folder_of_classes_is_split(plain: Path) -> None:
    data = Images(path=plain, side=16)
    assert data.labels() == CLASSES
    assert [data.size(split) for split in Split] == [24, 3, 3]
    for split in Split:
        images, labels = everything(data, split)
        assert images.shape == (data.size(split), 16, 16, 3)
        expected = np.array([COLOURS[CLASSES[label]] for label in labels])
        assert np.abs(images.mean((1, 2)) - expected).max() < 4
        assert np.bincount(labels).tolist() == [data.size(split) // 3] * 3


def test_split_folders_are_taken_as_they_are(tmp_path: Path) -> None:
    draw(tmp_path / "train", 10)
    data = Images(path=tmp_path, side=8)
    assert [data.size(split) for split in Split] == [27, 3, 0]
    draw(tmp_path / "val", 2)
    assert [data.size(split) for split in Split] == [30, 6, 0]
    draw(tmp_path / "test", 1)
    assert [data.size(split) for split in Split] == [30, 6, 3]
    (tmp_path / "val" / "fish").mkdir()
    assert data.size(Split.validation) == 6, "a folder without a picture is no class"
    Image.new("RGB", (8, 8)).save(tmp_path / "val" / "fish" / "0.png")
    with pytest.raises(DataError, match="'fish'"):
        data.size(Split.validation)


def test_packed_pictures_are_the_same_pictures(plain: Path, tmp_path: Path) -> None:
    data, out = Images(path=plain, side=16), tmp_path / "packed"
    assert pack(data, out) == {"train": 24, "validation": 3, "test": 3}
    packed = Images(path=out, side=16)
    assert packed.labels() == data.labels()
    for shuffled in (read(Split.train), read(Split.train, shuffle=True, seed=4)):
        for one, other in zip(data.open(shuffled), packed.open(shuffled), strict=True):
            np.testing.assert_array_equal(one["image"], other["image"])
            np.testing.assert_array_equal(one["label"], other["label"])
    with pytest.raises(DataError, match="packed already"):
        pack(packed, tmp_path / "again")
    (out / "train.array_record").unlink()
    with pytest.raises(NotFoundError, match="pack the pictures again"):
        next(packed.open(read(Split.train)))
    (out / INDEX).unlink()
    with pytest.raises(DataError, match="has no folders"):
        packed.labels()


def test_worker_processes_give_the_same_batches_name_what_is_left_out_and_resume(
    plain: Path,
) -> None:
    bad = spoil(plain)
    data = Images(path=plain, side=8)
    FILES.clear()
    alone = data.open(Read(split=Split.train, batch=12, seed=1))
    wanted = [next(alone) for _ in range(4)]
    names = set(FILES.take())
    FILES.clear()
    batches = data.open(Read(split=Split.train, batch=12, seed=1, workers=1))
    for number, want in enumerate(wanted):
        if number == 2:
            state = batches.get_state()
        have = next(batches)
        assert sorted(have) == ["image", "label", "mask"]
        assert all(np.array_equal(have[name], want[name]) for name in want)
        # A missing picture shows another one of the batch, so that batch norm sees pictures only.
        assert have["image"].mean((1, 2)).max(axis=1).min() > 200
    batches.close()
    assert {*FILES.take()} == names
    assert names
    assert all(any(line.startswith(name) for name in bad) for line in names)
    resumed = data.open(Read(split=Split.train, batch=12, seed=1))
    resumed.set_state(state)
    for want in wanted[2:]:
        np.testing.assert_array_equal(next(resumed)["image"], want["image"])


def test_training_shows_parts_and_evaluation_the_centre(tmp_path: Path) -> None:
    ramp = np.linspace(0, 255, 64, dtype=np.uint8)
    picture = np.stack(np.broadcast_arrays(ramp[None, :], ramp[:, None], np.uint8(0)), axis=-1)
    (tmp_path / "only").mkdir()
    for index in range(20):
        Image.fromarray(picture).save(tmp_path / "only" / f"{index:02}.png")
    data = Images(path=tmp_path, side=16)
    centred, _ = everything(data, Split.validation)
    edge = (1 - 0.875) / 2 * 255
    assert abs(centred[0, 0, 0, 0] - edge) < 12
    assert abs(centred[0, 0, -1, 0] - (255 - edge)) < 12
    parts = next(data.open(Read(split=Split.train, batch=16)))["image"].astype(int)
    rises = parts[:, 8, -1, 0] > parts[:, 8, 0, 0]
    assert 2 < rises.sum() < 14
    widths = abs(parts[:, 8, -1, 0] - parts[:, 8, 0, 0]) / 255
    assert widths.min() < 0.6
    assert widths.max() > 0.6
    whole = Images(path=tmp_path, side=16, augmentation=Augmentation(crop=1.0, flip=False))
    shown = next(whole.open(Read(split=Split.train, batch=16)))["image"].astype(int)
    assert (shown[:, 8, -1, 0] > shown[:, 8, 0, 0] + 150).all()


def test_random_boxes_lie_inside_and_have_the_asked_area() -> None:
    chances = np.random.default_rng(0).random((500, 4))
    areas = []
    for chance in chances:
        box = random_box(300, 200, 0.08, chance)
        assert 0 <= box.left < box.right <= 1 + 1e-9
        assert 0 <= box.top < box.bottom <= 1 + 1e-9
        areas.append((box.right - box.left) * (box.bottom - box.top))
    assert min(areas) > 0.079
    # Uniform from 0.08 to 1, less what is cut off where a stretched part does not fit.
    assert 0.45 < np.mean(areas) < 0.54


def test_a_jpeg_is_decoded_smaller_with_the_same_result(tmp_path: Path) -> None:
    ramp = np.linspace(0, 255, 512).astype(np.uint8)
    Image.fromarray(np.broadcast_to(ramp[None, :, None], (512, 512, 3)).copy()).save(
        tmp_path / "a.jpg", quality=95
    )
    Image.open(tmp_path / "a.jpg").save(tmp_path / "a.png")
    small, exact = (centre(decode(tmp_path / name), 32, 3) for name in ("a.jpg", "a.png"))
    assert np.abs(small.astype(int) - exact).max() <= 3


def test_pictures_are_turned_as_the_camera_says_and_made_grey(tmp_path: Path) -> None:
    picture = Image.fromarray(np.repeat([[0, 255]], 20, axis=1).repeat(40, axis=0).astype(np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    picture.save(tmp_path / "turned.jpg", exif=exif)
    read = Images(path=tmp_path, side=16, channels=1).load(tmp_path / "turned.jpg")["image"]
    assert read.shape == (16, 16, 1)
    assert read[:4].mean() < 20
    assert read[-4:].mean() > 235


def test_what_cannot_be_read_is_named_in_one_line(plain: Path, tmp_path: Path) -> None:
    for path, kind in ((tmp_path / "none", NotFoundError), (tmp_path / "empty", DataError)):
        if kind is DataError:
            path.mkdir()
        with pytest.raises(kind, match=path.name) as caught:
            Images(path=path).size(Split.train)
        assert "\n" not in str(caught.value)
    broken = plain / "cat" / "0.png"
    broken.write_bytes(broken.read_bytes()[:60])
    data = Images(path=plain, side=8, on_error=OnError.stop)
    split = next(s for s in Split if str(broken) in listing(plain, data.held_out, s).files)
    with pytest.raises(DataError, match=r"cat/0.png"):
        everything(data, split)
    with pytest.raises(DataError, match="is damaged"):
        crop(decode(broken), Crop(0, 0, 1, 1), 8, 3)


def spoil(plain: Path) -> set[str]:
    """Three files as they go wrong: cut short, of another kind, and empty."""
    first, second, third = (plain / name / "3.png" for name in CLASSES)
    first.write_bytes(first.read_bytes()[:60])
    second.write_text("not a picture")
    third.write_bytes(b"")
    return {str(first), str(second), str(third)}


@pytest.mark.parametrize("packed", [False, True])
def test_damaged_pictures_are_left_out_named_and_weigh_nothing(
    plain: Path, tmp_path: Path, packed: bool
) -> None:
    whole = Images(path=plain, side=16)
    places = {split: listing(plain, whole.held_out, split).files for split in Split}
    bad = spoil(plain)
    data = whole
    if packed:
        pack(whole, tmp_path / "packed")
        data = Images(path=tmp_path / "packed", side=16)
    FILES.clear()
    for split in Split:
        images, labels = everything(data, split)
        kept = [file not in bad for file in places[split]]
        assert len(images) == sum(kept)
        assert labels.tolist() == [
            CLASSES.index(Path(f).parent.name) for f in places[split] if f not in bad
        ]
        for image, label in zip(images, labels, strict=True):
            assert np.abs(image.mean((0, 1)) - COLOURS[CLASSES[label]]).max() < 4
    told = FILES.take()
    assert FILES.count == len(told) == 3
    assert {name for name in bad for line in told if line.startswith(name)} == bad
    list(data.open(read(Split.train)))
    assert FILES.take() == [], "each is named once"


def test_a_batch_of_damaged_pictures_only_ends_the_run(plain: Path) -> None:
    for file in listing(plain, 0.1, Split.train).files:
        Path(file).write_bytes(b"gone")
    with pytest.raises(DataError, match="none of 8 pictures in a row can be read"):
        next(Images(path=plain, side=8).open(read(Split.train)))


def test_a_class_folder_without_a_picture_is_named_and_no_class(plain: Path) -> None:
    (plain / "ant").mkdir()
    (plain / "ant" / "readme.txt").write_text("pictures follow")
    data = Images(path=plain, side=8)
    assert data.labels() == CLASSES
    (note,) = data.notes()
    assert note.startswith(f"{plain / 'ant'} has no picture")
    assert note.endswith("and is no class")
    assert {*everything(data, Split.train)[1].tolist()} == {0, 1, 2}


def test_pictures_from_elsewhere_have_the_classes_of_training(plain: Path, tmp_path: Path) -> None:
    draw(tmp_path / "new", 3)
    (tmp_path / "new" / "bird").rename(tmp_path / "no birds")
    other = Images(path=plain, side=16).at(tmp_path / "new")
    assert other.labels() == CLASSES
    assert [other.size(split) for split in Split] == [0, 6, 0]
    _, labels = everything(other, Split.validation)
    assert labels.tolist() == [1, 1, 1, 2, 2, 2]
    (tmp_path / "new" / "cat").rename(tmp_path / "new" / "lynx")
    with pytest.raises(DataError, match="has a class 'lynx' that training does not"):
        other.size(Split.validation)
    draw(tmp_path / "splits" / "train", 2)
    with pytest.raises(DataError, match="has folders of splits; give one of them, such as"):
        Images(path=plain).at(tmp_path / "splits")
    pack(Images(path=plain), tmp_path / "packed")
    with pytest.raises(DataError, match="is packed; give the folder of pictures"):
        Images(path=plain).at(tmp_path / "packed")


def test_the_classes_of_a_run_outlive_its_folder(plain: Path) -> None:
    data = Images(path=plain, side=16)
    kept = data.with_labels(data.labels())
    (plain / "cat").rename(plain.parent / "cat")
    assert data.labels() == ("bird", "dog")
    assert kept.labels() == CLASSES
    assert set(kept.listing(Split.train).labels.tolist()) == {0, 2}
