"""Files, datasets and topics as documents: what comes out, again and again, and what a wrong input says."""

from __future__ import annotations

import gzip
import hashlib
import json
import tracemalloc

import pytest

from unembed.results import InputError
from unembed.text import Document, read_dataset, read_files, read_topics


def _texts(source):
    return [document.text for document in source]


def test_plain_files_are_one_document_each_in_the_order_given(tmp_path):
    (tmp_path / "b.txt").write_text("zwei\n", encoding="utf-8")
    (tmp_path / "a.md").write_text("ein Ä\n", encoding="utf-8")
    source = read_files([tmp_path / "b.txt", str(tmp_path / "a.md")])
    expected = [Document(str(tmp_path / "b.txt"), "zwei\n"), Document(str(tmp_path / "a.md"), "ein Ä\n")]
    assert list(source) == expected
    assert list(source) == expected, "a source starts afresh each time"
    assert source.name == "b.txt, a.md"


def test_describe_names_files_by_their_hash(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"hello")
    about = read_files([tmp_path / "a.txt"]).describe()
    digest = hashlib.sha256(b"hello").hexdigest()
    assert about == {"kind": "files", "number": 1, "files": [{"name": "a.txt", "bytes": 5, "sha256": digest}]}
    assert json.loads(json.dumps(about)) == about


@pytest.mark.parametrize("packed", [False, True])
def test_byte_order_marks_and_gzip_do_not_reach_the_text(tmp_path, packed):
    write = gzip.compress if packed else bytes
    end = ".gz" if packed else ""
    (tmp_path / f"a.txt{end}").write_bytes(write(b"\xef\xbb\xbfhello"))
    (tmp_path / f"a.jsonl{end}").write_bytes(write(b'\xef\xbb\xbf{"text": "one"}\r\n\n{"text": "two", "x": 1}'))
    assert _texts(read_files([tmp_path / f"a.txt{end}", tmp_path / f"a.jsonl{end}"])) == ["hello", "one", "two"]


def test_jsonl_names_lines_and_takes_another_field(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "one"}\n{"body": "  "}\n{"body": "three"}\n')
    source = read_files([path], field="body")
    assert list(source) == [Document(f"{path}:1", "one"), Document(f"{path}:3", "three")]
    assert source.describe()["field"] == "body"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n{"text": \n', r"a\.jsonl, line 2: expected a JSON object"),
        (b'{"text": "a"}\n\n[1]\n', r"line 3: expected an object with the key `text`, got list"),
        (b'{"body": "a", "id": 1}\n', r"line 1: .* key `text`, got the keys \['body', 'id'\]"),
        (b'{"text": 7}\n', r"line 1: expected a string at `text`, got int"),
        (b'{"text": "a"}\n{"text": "\xff"}\n', r"got byte 0xff at offset 24; convert"),
        (b"[" * 100000, r"line 1: expected a JSON object"),
        (b"\n \n", r"expected text, got only white space"),
    ],
)
def test_a_bad_jsonl_names_file_and_line(tmp_path, content, message):
    (tmp_path / "a.jsonl").write_bytes(content)
    source = read_files([tmp_path / "a.jsonl"])
    with pytest.raises(InputError, match=message) as error:
        list(source)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("characters", [0, 5, (1 << 19) - 1, 1 << 19, (1 << 19) + 3])
@pytest.mark.parametrize("odd", [b"", b"x"])
def test_a_bad_byte_is_named_by_its_offset_across_read_chunks(tmp_path, characters, odd, mark):
    before = mark + odd + "é".encode() * characters  # with an odd start a character is cut by the end of a chunk
    (tmp_path / "a.txt").write_bytes(before + b"\xe9 end")
    with pytest.raises(InputError, match=rf"a\.txt: expected UTF-8, got byte 0xe9 at offset {len(before)}; convert"):
        list(read_files([tmp_path / "a.txt"]))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.txt", None, r"none\.txt: cannot be read \(No such file or directory\)"),
        ("empty.txt", b"", r"empty\.txt: expected text, got an empty file"),
        ("blank.txt", b" \n\t\n", r"blank\.txt: expected text, got only white space"),
        ("cut.txt.gz", gzip.compress(b"hello" * 1000, mtime=0)[:-20], r"cut\.txt\.gz: cannot be read"),
        ("not.txt.gz", b"hello", r"not\.txt\.gz: cannot be read \(Not a gzipped file"),
        ("cut.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 999, mtime=0)[:-20], r"cut\.jsonl\.gz: cannot be read"),
    ],
)
def test_a_file_without_text_is_refused(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        list(read_files([tmp_path / name]))


def test_folders_and_no_paths_are_refused_at_once(tmp_path):
    with pytest.raises(InputError, match="got a folder; name the files"):
        read_files([tmp_path])
    with pytest.raises(InputError, match="at least one text file"):
        read_files([])


def test_a_long_file_is_cut_at_line_ends_and_loses_nothing(tmp_path):
    text = "".join(f"line {i} of a long file\n" for i in range(250_000)) + "the end"
    (tmp_path / "a.txt").write_text(text)
    tracemalloc.start()
    found, ids, sizes = hashlib.sha256(), [], []
    for document in read_files([tmp_path / "a.txt"]):
        found.update(document.text.encode())
        ids.append(document.id.rpartition("/")[2])
        sizes.append(len(document.text))
        assert document.text.endswith(("\n", "the end"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.digest() == hashlib.sha256(text.encode()).digest()
    assert ids == ["a.txt", *(f"a.txt#{part}" for part in range(2, len(ids) + 1))]
    assert max(sizes) <= 1 << 15
    assert min(sizes[:-1]) > 1 << 14, "no more parts than needed"
    assert peak < 6 << 20, "some MiB at a time, not the whole"


def test_topics_are_sorted_hashed_and_have_a_length():
    source = read_topics()
    ids = [document.id for document in source]
    assert ids == sorted(ids)
    assert "pydoc:assert" in ids
    assert len(source) == len(ids) == source.describe()["number"]
    digest = hashlib.sha256("".join(f"{text}\0" for text in _texts(source)).encode()).hexdigest()
    assert source.describe()["sha256"] == digest


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """A folder with a jsonl and one with a parquet of the same three rows; the hub's cache elsewhere."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for folder in ("lines", "columns"):
        (tmp_path / folder).mkdir()
    lines = [{"text": "one", "other": "1"}, {"text": " ", "other": "2"}, {"text": "three", "other": "3"}]
    (tmp_path / "lines" / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(lines), tmp_path / "columns" / "train.parquet")
    return tmp_path


@pytest.mark.parametrize("path", ["lines", "columns", "lines/train.jsonl", "columns/train.parquet"])
def test_a_local_dataset_streams_its_rows_each_time(rows, path):
    source = read_dataset(str(rows / path))
    assert not hasattr(source, "__len__"), "a stream is never shuffled"
    assert _texts(source) == _texts(source) == ["one", "three"]
    assert [document.id.rpartition("#")[2] for document in source] == ["0", "2"]
    about = source.describe()
    assert (about["kind"], about["split"], about["field"]) == ("dataset", "train", "text")
    assert json.loads(json.dumps(about)) == about


def test_a_dataset_saved_to_disk_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([{"text": "one"}]).save_to_disk(str(tmp_path / "saved"))
    assert _texts(read_dataset(str(tmp_path / "saved"))) == ["one"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"field": "body"}, r"expected a column `body`, got \['other', 'text'\]"),
        ({"split": "test"}, "cannot be opened .*test"),
        ({"config": "german"}, "cannot be opened .*german"),
    ],
)
def test_a_wrong_choice_in_a_dataset_is_one_line(rows, options, message):
    with pytest.raises(InputError, match=message) as error:
        read_dataset(str(rows / "lines"), **options)
    assert "\n" not in str(error.value)


def test_a_dataset_that_is_not_there_is_one_line(tmp_path):
    pytest.importorskip("datasets")
    with pytest.raises(InputError, match="cannot be opened") as error:
        read_dataset(str(tmp_path / "nowhere"))
    assert "\n" not in str(error.value)
    (tmp_path / "a.xyz").write_text("x")
    with pytest.raises(InputError, match=r"expected one of .*'\.parquet'.*, got '\.xyz'"):
        read_dataset(str(tmp_path / "a.xyz"))


def test_a_row_that_is_no_text_is_named(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "train.jsonl").write_text('{"text": "one"}\n{"text": null}\n')
    with pytest.raises(InputError, match=r"row 1: expected a string at `text`, got NoneType"):
        list(read_dataset(str(tmp_path)))


def test_without_datasets_the_extra_is_named(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r'needs datasets: pip install "unembed\[hf\]"'):
        read_dataset("any")
