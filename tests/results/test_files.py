"""Files are whole or absent."""

import errno
import os
import stat
from pathlib import Path

import pytest

from unembed.results import write_whole
from unembed.results._files import replace_together


def _full_disk(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def _everything(folder):
    """Relative names of all files and folders with the content of the files."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


def test_text_is_utf8_and_missing_folders_are_made(tmp_path):
    path = tmp_path / "a" / "b" / "c.txt"
    with write_whole(path) as file:
        file.write("naïve 終\n")
    assert path.read_bytes() == "naïve 終\n".encode()
    with write_whole(path, "wb") as file:
        file.write(b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"
    assert [p.name for p in path.parent.iterdir()] == ["c.txt"]


@pytest.mark.skipif(os.name == "nt", reason="permissions of POSIX")
def test_the_file_has_the_usual_permissions_not_those_of_a_temporary_one(tmp_path):
    with write_whole(tmp_path / "ours") as file:
        file.write("x")
    (tmp_path / "usual").write_text("x")
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("ours", "usual")}
    assert len(modes) == 1


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt(), ValueError("ours")])
@pytest.mark.parametrize("before", [None, "old"])
def test_an_error_half_way_leaves_what_was_there_and_no_temporary_file(tmp_path, error, before):
    path = tmp_path / "file.txt"
    if before is not None:
        path.write_text(before)
    with pytest.raises(type(error)), write_whole(path) as file:  # noqa: PT012
        file.write("half")
        file.flush()
        raise error
    assert _everything(tmp_path) == ({} if before is None else {"file.txt": b"old"})


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_disk_that_fills_at_the_last_step_leaves_what_was_there(tmp_path, monkeypatch, step):
    path = tmp_path / "file.txt"
    path.write_text("old")
    with monkeypatch.context() as patch:
        if step == "fsync":
            patch.setattr(os, "fsync", _full_disk)
        else:
            patch.setattr(Path, "replace", _full_disk)
        with pytest.raises(OSError, match="No space"), write_whole(path) as file:
            file.write("new")
    assert _everything(tmp_path) == {"file.txt": b"old"}


def test_a_lone_surrogate_cannot_be_text_and_leaves_nothing(tmp_path):
    with pytest.raises(UnicodeEncodeError), write_whole(tmp_path / "file.txt") as file:
        file.write("\ud800")
    assert _everything(tmp_path) == {}


def test_a_folder_of_files_takes_its_place_at_once_and_keeps_strangers(tmp_path):
    (tmp_path / "tables").mkdir()
    for name in ("mine.txt", "tables/old.csv", "tables/kept.csv"):
        (tmp_path / name).write_text("before")
    with replace_together(tmp_path) as stage:
        stage.text("tables/new.csv", "\ud800 new")
        with stage.open("data.bin") as file:
            file.write(b"\x00")
        stage.drop(["tables/old.csv", "never-there"])
        assert (tmp_path / "tables" / "old.csv").exists()
        assert not (tmp_path / "data.bin").exists()
    assert _everything(tmp_path) == {
        "data.bin": b"\x00",
        "mine.txt": b"before",
        "tables": None,
        "tables/kept.csv": b"before",
        "tables/new.csv": b"\\ud800 new",
    }


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_a_folder_that_fails_half_way_is_left_as_it_was(tmp_path, error):
    old, new = tmp_path / "old", tmp_path / "new" / "deep"
    old.mkdir()
    (old / "a.txt").write_text("before")
    for folder in (old, new):
        with pytest.raises(type(error)), replace_together(folder) as stage:  # noqa: PT012
            stage.text("a.txt", "after")
            stage.drop(["a.txt"])
            raise error
    assert _everything(tmp_path) == {"old": None, "old/a.txt": b"before"}


@pytest.mark.parametrize("obstacle", ["z.txt", "tables"])
def test_something_in_the_way_is_met_before_any_file_moves(tmp_path, obstacle):
    (tmp_path / "a.txt").write_text("before")
    if obstacle == "tables":
        (tmp_path / "tables").write_text("a file where a folder should be")
    else:
        (tmp_path / "z.txt").mkdir()
    before = _everything(tmp_path)
    with pytest.raises(OSError, match=obstacle), replace_together(tmp_path) as stage:  # noqa: PT012
        stage.text("a.txt", "after")
        stage.text("tables/t.csv", "after")
        stage.text("z.txt", "after")
    after = _everything(tmp_path)
    after.pop("tables") if obstacle != "tables" else None
    assert after == before


def test_a_file_in_place_of_the_folder_is_an_error(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(OSError), replace_together(tmp_path / "file"):  # noqa: PT011
        pass
    assert _everything(tmp_path) == {"file": b"x"}
