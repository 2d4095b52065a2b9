"""Text sources: every byte predicted once, documents apart, any format, exact resume."""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from systolic.core.errors import DataError, NotFoundError, OptionError
from systolic.data.text.documents import Documents, StandardLibrary
from systolic.data.text.packed import fresh_folder, pack_text
from systolic.data.text.rows import cut, fit, lay
from systolic.data.text.text_data import Packing
from systolic.data.text.tokenizer import Tokenizer
from systolic.job.data import Read, Split
from tests.tiers import some

WORDS = ("the", "array", "flows", "through", "cells", "while", "pulses", "beat", "and", "sums")


def texts(count: int, longest: int = 40, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return [
        f"{n}: " + " ".join(rng.choice(WORDS, rng.integers(1, longest))) + " caf\u00e9"
        for n in range(count)
    ]


def read(**changes) -> Read:
    return Read(**{"split": Split.train, "batch": 4, "epochs": 1, **changes})


def documents_of(batch) -> list[list[int]]:
    """Each segment of each row as its tokens and its last target, after checking it."""
    out = []
    for row in range(len(batch["tokens"])):
        segments, positions = batch["segments"][row], batch["positions"][row]
        if not batch["mask"][row]:
            assert not segments.any()
            assert (batch["targets"][row] == -1).all()
            continue
        assert (np.diff(segments[segments > 0]) >= 0).all()
        assert ((batch["targets"][row] == -1) == (segments == 0)).all()
        for segment in range(1, segments.max() + 1):
            at = np.flatnonzero(segments == segment)
            assert (np.diff(at) == 1).all()
            assert np.array_equal(positions[at], np.arange(len(at)))
            assert np.array_equal(batch["targets"][row][at[:-1]], batch["tokens"][row][at[1:]])
            out.append([*batch["tokens"][row][at].tolist(), int(batch["targets"][row][at[-1]])])
    return out


def pairs(pieces) -> list[tuple[int, int]]:
    return sorted(pair for piece in pieces for pair in pairwise(piece))


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), max_size=20),
    sequence=st.integers(1, 12),
    pack=st.sampled_from([cut, fit]),
)
def test_packing_keeps_every_pair_once_and_documents_apart(lengths, sequence, pack):
    starts = np.cumsum([0, *lengths])
    documents = [np.arange(a, a + n) for a, n in zip(starts, lengths, strict=False)]
    rows = lay(pack(documents, sequence), sequence)
    rows["mask"] = np.ones(len(rows["tokens"]))
    found = documents_of(rows)
    assert pairs(found) == pairs([d.tolist() for d in documents])
    for piece in found:
        assert piece == list(range(piece[0], piece[-1] + 1))
        assert sum(piece[0] >= starts) == sum(piece[-1] >= starts)
    full = sum(max(n - 1, 0) for n in lengths)
    if pack is cut:
        assert len(rows["tokens"]) == -(-full // sequence)
    # Two rows that are both less than half full would have been one.
    used = (rows["segments"] > 0).sum(axis=1)
    assert (used > 0).all()
    assert (2 * used <= sequence).sum() <= 1


def test_best_fit_wastes_little_on_short_documents():
    rng = np.random.default_rng(0)
    documents = [np.arange(n) for n in rng.lognormal(4, 1, 5000).astype(int) + 2]
    rows = lay(fit(documents, 1024), 1024)
    assert (rows["segments"] == 0).mean() < 0.005


@pytest.fixture
def code(tmp_path) -> Path:
    for n, text in enumerate(texts(60)):
        file = tmp_path / "code" / f"package{n % 3}" / f"module{n}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    for left_out in ("test", "tests", "site-packages", "idlelib/idle_test", "lib2to3/tests"):
        file = tmp_path / "code" / left_out / "x.py"
        file.parent.mkdir(parents=True)
        file.write_text("left out")
    (tmp_path / "code" / "empty.py").write_text("")
    return tmp_path / "code"


@pytest.mark.parametrize("sequence", [7, 64, 5000])
def test_standard_library_predicts_each_byte_once(code, sequence):
    data = StandardLibrary(root=code, sequence=sequence)
    for split in (Split.train, Split.validation):
        batches = list(data.open(read(split=split, shards=1)))
        found = [piece for batch in batches for piece in documents_of(batch)]
        content = [file.read_bytes() for file in data.files(split) if file.stat().st_size]
        assert pairs(found) == pairs([[256, *one] for one in content])
        assert data.size(split) == sum(int(batch["mask"].sum()) for batch in batches)
    names = [f.relative_to(code).as_posix() for f in data.files(Split.train)]
    assert names == sorted(names)
    assert not any("x.py" in name for name in names)
    assert data.vocab_size() == 257


def test_standard_library_rows_in_order_are_the_files(code):
    data = StandardLibrary(root=code, sequence=16)
    rows = list(data.open(read(split=Split.validation, shuffle=False, batch=1)))
    flat = np.concatenate([row["targets"][0] for row in rows])
    files = b"".join(file.read_bytes() for file in data.files(Split.validation))
    assert bytes(flat[flat >= 0].tolist()) == files


def test_gzip_baselines_are_those_of_gzip(code):
    import gzip

    data = StandardLibrary(root=code)
    each = [file.read_bytes() for file in data.files(Split.validation)]
    total = sum(map(len, each))
    bits = 8 * sum(len(gzip.compress(one, 9)) for one in each)
    assert data.gzip_bits_per_byte() == pytest.approx(bits / total)
    assert data.gzip_bits_per_byte_joined() < data.gzip_bits_per_byte()


def test_the_real_standard_library_has_both_splits():
    data = StandardLibrary()
    train, validation = data.files(Split.train), data.files(Split.validation)
    assert len(train) > 5 * len(validation) > 100
    assert 1.5 < data.gzip_bits_per_byte() < 2.6


def test_standard_library_without_files_is_said(tmp_path):
    with pytest.raises(NotFoundError, match="not a folder"):
        StandardLibrary(root=tmp_path / "none").size(Split.train)
    with pytest.raises(DataError, match=r"no \.py file for the train split"):
        StandardLibrary(root=tmp_path).open(read())
    with pytest.raises(OptionError, match="sequence is 0"):
        StandardLibrary(sequence=0)


def write(kind: str, folder: Path, content: list[str]) -> Path:
    """The same documents in one of the formats."""
    if kind == "txt":
        folder.mkdir()
        for n, text in enumerate(content):
            (folder / f"{n:04d}.txt").write_text(text)
        return folder
    if kind == "jsonl":
        lines = [json.dumps({"id": n, "text": text}) for n, text in enumerate(content)]
        file = folder.with_suffix(".jsonl")
        file.write_bytes(("\n".join(lines) + "\n\r\n").encode())
        return file
    if kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        file = folder.with_suffix(".parquet")
        table = pyarrow.table({"text": content, "id": list(range(len(content)))})
        pyarrow.parquet.write_table(table, file, row_group_size=7)
        return file
    if kind == "array_record":
        from array_record.python.array_record_module import ArrayRecordWriter

        file = folder.with_suffix(".array_record")
        writer = ArrayRecordWriter(str(file), "group_size:1")
        for text in content:
            writer.write(text.encode())
        writer.close()
        return file
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"text": content}).save_to_disk(str(folder))
    return folder


KINDS = ["txt", "jsonl", "parquet", "array_record", "datasets"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packing", list(Packing))
def test_every_document_of_every_format_comes_once(kind, packing, tmp_path):
    content = texts(50)
    data = Documents(
        path=write(kind, tmp_path / "corpus", content),
        sequence=64,
        validation_share=0.1,
        packing=packing,
    )
    seen: dict[Split, list] = {}
    for split in (Split.train, Split.validation):
        hosts = [
            list(data.open(read(split=split, shards=2, shard=shard, seed=3))) for shard in (0, 1)
        ]
        assert len(hosts[0]) == len(hosts[1])
        seen[split] = [p for host in hosts for batch in host for p in documents_of(batch)]
    whole = [[256, *text.encode(), 256] for text in content]
    assert pairs(seen[Split.train] + seen[Split.validation]) == pairs(whole)
    numbers = data.documents(Split.validation)[1]
    assert 1 <= len(numbers) <= 15
    assert pairs(seen[Split.validation]) == pairs([whole[n] for n in numbers])
    assert data.size(Split.test) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_an_endless_stream_is_shuffled_anew_and_resumes_anywhere(kind, tmp_path):
    content = texts(40, longest=120)
    data = Documents(path=write(kind, tmp_path / "corpus", content), sequence=32)
    first = data.open(read(epochs=None, seed=1, batch=3))
    states, batches = [], []
    for _ in range(60):
        states.append(first.get_state())
        batches.append(next(first))
    for start in (0, 1, 17, 43):
        again = data.open(read(epochs=None, seed=1, batch=3))
        again.set_state(states[start])
        assert again.get_state() == states[start]
        for want in batches[start : start + 8]:
            have = next(again)
            assert all(np.array_equal(have[name], want[name]) for name in want)
        again.close()
    first.set_state(states[5])
    assert np.array_equal(next(first)["tokens"], batches[5]["tokens"])
    other = next(data.open(read(epochs=None, seed=2, batch=3)))
    assert not np.array_equal(other["tokens"], batches[0]["tokens"])
    first.close()


def test_endless_hosts_read_different_windows(tmp_path):
    content = texts(400, longest=100)
    path = write("jsonl", tmp_path / "corpus", content)
    data = Documents(path=path, sequence=8, validation_share=0)
    hosts = [data.open(read(epochs=None, shards=2, shard=s, batch=8)) for s in (0, 1)]
    per_epoch = hosts[0].windows.per_epoch
    assert per_epoch >= 4
    seen = [set(), set()]
    for which, host in enumerate(hosts):
        while host.window < per_epoch // 2:
            for piece in documents_of(next(host)):
                if piece[0] == 256:
                    number = bytes(t for t in piece[1:] if t < 256).split(b":")[0]
                    seen[which].add(number)
        host.close()
    whole = {number for number in seen[0] & seen[1] if len(number) == 3}
    assert len(whole) < 0.1 * len(seen[0])


@pytest.mark.slow
@pytest.mark.parametrize("after", some([1, 2, 4, 5], [2, 4]))
def test_another_number_of_hosts_leaves_no_document_out(after, tmp_path):
    path = write("jsonl", tmp_path / "corpus", texts(600, longest=100))
    data = Documents(path=path, sequence=8, validation_share=0)

    def hosts(count):
        return [data.open(read(epochs=None, shards=count, shard=s, batch=1)) for s in range(count)]

    def rows(host, ready):
        while ready(host):
            seen.extend(documents_of(next(host)))

    want = hosts(1)[0]
    seen = []
    rows(want, lambda host: host.window < host.windows.per_epoch)
    whole, per_epoch = Counter(pairs(seen)), want.windows.per_epoch
    assert per_epoch >= 12
    seen, before = [], hosts(3)
    # A slice's hosts are at the same batch but not in the same round of windows.
    for host, window in zip(before, (6, 1, 5), strict=True):
        rows(host, lambda host, window=window: host.window < window)
        seen += documents_of(next(host))
    position = data.earliest([host.get_state() for host in before])
    for host in hosts(after):
        host.set_state(position)
        rows(host, lambda host: host.window < per_epoch)
    assert not whole - Counter(pairs(seen))
    extra = sum((Counter(pairs(seen)) - whole).values())
    assert extra < 0.5 * sum(whole.values())


@pytest.mark.slow
def test_worker_processes_pack_the_same_and_resume(tmp_path, tokenizer_file):
    path = write("jsonl", tmp_path / "corpus", texts(200))
    data = Documents(path=path, sequence=16, tokenizer=tokenizer_file)
    threads, workers = (data.open(read(epochs=None, workers=w)) for w in (0, 2))
    for _ in range(20):
        want, have = next(threads), next(workers)
        assert all(np.array_equal(have[name], want[name]) for name in want)
    state = threads.get_state()
    assert workers.get_state() == state
    workers.close()
    resumed = data.open(read(epochs=None, workers=2))
    resumed.set_state(state)
    assert np.array_equal(next(resumed)["tokens"], next(threads)["tokens"])
    resumed.close()
    threads.close()


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_pack_and_read_back(kind, tmp_path, tokenizer_file, monkeypatch):
    monkeypatch.setattr("systolic.data.text.packed._RECORD_PLACES", 50)
    content = [*texts(80), "long " * 300]
    data = Documents(
        path=write(kind, tmp_path / "corpus", content),
        tokenizer=tokenizer_file,
        validation_share=0.1,
    )
    told = []
    manifest = pack_text(
        data, tmp_path / "packed", shard_bytes=2000, tell=lambda *now: told.append(now)
    )
    assert len(manifest["splits"]["train"]["files"]) > 1
    assert told[-1][0] is Split.validation
    packed = Documents(path=tmp_path / "packed", sequence=24)
    tokens = Tokenizer(path=tokenizer_file).documents(content)
    assert packed.vocab_size() == Tokenizer(path=tokenizer_file).vocab_size
    numbers = {split: data.documents(split)[1] for split in (Split.train, Split.validation)}
    for split, kept in numbers.items():
        batches = list(packed.open(read(split=split, seed=5)))
        found = [piece for batch in batches for piece in documents_of(batch)]
        assert pairs(found) == pairs([tokens[n].tolist() for n in kept])
        assert packed.size(split) == sum(int(batch["mask"].sum()) for batch in batches)
    # A packed record boundary inside a document is not a document boundary.
    opened = packed.open(read(batch=10_000))
    starts = sum(piece[0] == 0 for piece in documents_of(next(opened)))
    assert starts == len(numbers[Split.train])
    first = packed.open(read(epochs=None))
    for _ in range(7):
        next(first)
    again = packed.open(read(epochs=None))
    again.set_state(first.get_state())
    assert np.array_equal(next(again)["tokens"], next(first)["tokens"])
    for opened in (first, again):
        opened.close()


def test_a_killed_pack_leaves_nothing_that_looks_whole(tmp_path, monkeypatch):
    path = write("jsonl", tmp_path / "corpus", texts(30))
    out = tmp_path / "packed"

    def die(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack_text(Documents(path=path), out, tell=die)
    assert not out.exists()
    # As after SIGKILL: the scratch folder is there, and the next run starts afresh.
    (tmp_path / ".packed.partial").mkdir()
    (tmp_path / ".packed.partial" / "train-00000.array_record").write_bytes(b"half")
    pack_text(Documents(path=path), out)
    assert not (tmp_path / ".packed.partial").exists()
    assert Documents(path=out, sequence=8).size(Split.train) > 0
    with pytest.raises(OptionError, match="exists"):
        pack_text(Documents(path=path), out)
    with pytest.raises(DataError, match="packed already"):
        pack_text(Documents(path=out), tmp_path / "again")
    with pytest.raises(OptionError, match="exists"), fresh_folder(out):
        pass


def test_a_damaged_packed_folder_is_said(tmp_path):
    path = write("jsonl", tmp_path / "corpus", texts(30))
    out = tmp_path / "packed"
    pack_text(Documents(path=path), out)
    (out / "train-00000.array_record").unlink()
    with pytest.raises(DataError, match="missing from the packed data"):
        Documents(path=out).open(read())
    (out / "train-00000.array_record").write_bytes(b"garbage" * 1000)
    with pytest.raises(DataError, match=r"ArrayRecord|records but an index"):
        Documents(path=out).open(read())
    (out / "validation.index.npz").write_bytes(b"garbage")
    with pytest.raises(DataError, match="index of the validation split is damaged"):
        Documents(path=out).open(read(split=Split.validation))
    (out / "dataset.json").write_text('{"kind": "text", "format": 99}')
    with pytest.raises(DataError, match="format 99"):
        Documents(path=out).open(read())


def test_one_long_file_is_cut_at_lines_into_documents(tmp_path):
    file = tmp_path / "input.txt"
    lines = "".join(f"line {n} caf\u00e9 of the play\n" for n in range(20_000))
    file.write_text(lines)
    data = Documents(path=file, sequence=1024)
    corpus, kept = data.documents(Split.train)
    validation = data.documents(Split.validation)[1]
    assert len(corpus) > 8
    assert 1 <= len(validation) < len(kept)
    pieces = corpus.read(np.arange(len(corpus)))
    assert b"".join(pieces).decode() == lines
    assert all(piece.endswith(b"\n") for piece in pieces)
    file.write_text("\u00e9" * 100_000)
    for piece in data.documents(Split.train)[0].read(np.arange(3)):
        assert set(piece.decode()) == {"\u00e9"}


def test_splits_of_a_dataset_dict_and_a_validation_path(tmp_path):
    import datasets

    datasets.disable_progress_bars()
    parts = {"train": texts(20), "validation": texts(5, seed=9)}
    whole = datasets.DatasetDict(
        {name: datasets.Dataset.from_dict({"text": part}) for name, part in parts.items()}
    )
    whole.save_to_disk(str(tmp_path / "dict"))
    data = Documents(path=tmp_path / "dict", sequence=64)
    assert len(data.documents(Split.train)[1]) == 20
    assert len(data.documents(Split.validation)[1]) == 5
    own = Documents(
        path=write("txt", tmp_path / "a", texts(6)),
        validation=write("jsonl", tmp_path / "b", texts(3)),
    )
    assert len(own.documents(Split.train)[1]) == 6
    assert len(own.documents(Split.validation)[1]) == 3


def test_text_mistakes_are_one_line(tmp_path, tokenizer_file):
    path = write("jsonl", tmp_path / "corpus", texts(5))
    parquet = write("parquet", tmp_path / "corpus", texts(5))
    cases = [
        (Documents(path=tmp_path / "no"), NotFoundError, "does not exist"),
        (Documents(path=path, field="txet"), DataError, "no text field 'txet'; did you mean text"),
        (Documents(path=parquet, field="txet"), DataError, "did you mean text"),
        (Documents(path=parquet, field="id"), DataError, "it has text"),
        (Documents(path=path, tokenizer=path), DataError, "not a tokenizer.json"),
        (Documents(path=path, tokenizer=tmp_path), NotFoundError, "has no tokenizer.json"),
        (Documents(path=tmp_path), DataError, "both JSONL and Parquet"),
    ]
    empty = tmp_path / "empty"
    empty.mkdir()
    cases.append((Documents(path=empty), DataError, "holds no text"))
    (tmp_path / "a.jsonl").write_text("")
    cases.append((Documents(path=tmp_path / "a.jsonl"), DataError, "has no documents"))
    (tmp_path / "x.parquet").write_text("not parquet")
    cases.append((Documents(path=tmp_path / "x.parquet"), DataError, "not a Parquet file"))
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (tmp_path / "x.jsonl.gz").write_text("")
    cases.append((Documents(path=tmp_path / "x.jsonl.gz"), DataError, "decompress"))
    for data, kind, message in cases:
        with pytest.raises(kind, match=message) as raised:
            data.open(read())
        assert "\n" not in str(raised.value)
    bad = Documents(path=tmp_path / "bad.jsonl", validation_share=0)
    with pytest.raises(DataError, match=r"bad\.jsonl line 2 is not JSON"):
        bad.size(Split.train)  # which is asked before a model is built
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n\n\n{"txt": "b"}\n')
    with pytest.raises(DataError, match=r"bad\.jsonl line 4 has no text field 'text'"):
        bad.size(Split.train)
    (empty / "b.jsonl").write_text('{"text": ""}\n' * 5)
    with pytest.raises(DataError, match="are empty"):
        next(Documents(path=empty / "b.jsonl").open(read(epochs=None)))
    with pytest.raises(DataError, match="no test split"):
        Documents(path=path).open(read(split=Split.test))
    with pytest.raises(OptionError, match="validation-share"):
        Documents(path=path, validation_share=1.5)
    state = Documents(path=path).open(read()).get_state()
    with pytest.raises(
        DataError, match="tokens of the tokenizer bytes, the data now has tokens of"
    ):
        Documents(path=path, tokenizer=tokenizer_file).open(read()).set_state(state)


def test_fields_need_no_data():
    fields = Documents(path=Path("/nowhere"), sequence=9).fields()
    assert {field.shape for field in fields.values()} == {(9,)}
    assert set(fields) == {"tokens", "targets", "segments", "positions"}


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    """In the first line of a JSONL file, and at the start of a text; another Unicode is named."""
    rows = "".join(f"{json.dumps({'text': text})}\n" for text in ("one", "two"))
    for name, content in (("a.jsonl", rows), ("b.txt", "one")):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content.encode())
        corpus, _ = Documents(path=tmp_path / name).documents(Split.train)
        assert corpus.read(np.arange(1)) == [b"one"]
        (tmp_path / name).write_bytes(content.encode("utf-16"))
        with pytest.raises(DataError, match=rf"{name} is UTF-16 .* iconv -f UTF-16 -t UTF-8"):
            Documents(path=tmp_path / name).documents(Split.train)
