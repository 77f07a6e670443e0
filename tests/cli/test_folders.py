from pathlib import Path

import pytest

from unembed.cli._folders import folders
from unembed.results import InputError


def _names(*models: str, out: Path | None = None) -> list[str]:
    return [folder.as_posix() for _, folder in folders(models, out)]


@pytest.fixture(autouse=True)
def models(tmp_path, monkeypatch):
    for name in ("a/ck", "b/ck", "b/c/ck", "B2/CK"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)


def test_one_model_takes_out_itself_and_several_a_folder_each_below_it():
    assert folders([], None) == [(None, Path("out/demonstration"))]
    assert folders([], Path("x")) == [(None, Path("x"))]
    assert _names("a/ck") == ["out/ck"]
    assert _names("a/ck", out=Path("x")) == ["x"]
    assert _names("a/ck", "org/name", out=Path("x")) == ["x/ck", "x/org-name"]


def test_equal_names_get_parents_in_front_until_they_differ():
    assert _names("a/ck", "b/ck") == ["out/a-ck", "out/b-ck"]
    assert _names("a/ck", "b/ck", "org/name", out=Path("x")) == ["x/a-ck", "x/b-ck", "x/org-name"]
    assert _names("a/ck", "B2/CK") == ["out/a-ck", "out/B2-CK"]
    Path("c").mkdir()
    Path("c/ck").mkdir()
    deeper = Path.cwd().name
    assert _names("b/c/ck", "c/ck") == ["out/b-c-ck", f"out/{deeper}-c-ck"]


def test_a_gguf_file_gives_its_name_without_the_ending():
    Path("a/m.gguf").write_text("")
    Path("b/m.gguf").write_text("")
    assert _names("a/m.gguf") == ["out/m"]
    assert _names("a/m.gguf", "b/m.gguf") == ["out/a-m", "out/b-m"]
    Path("a/m").mkdir()
    with pytest.raises(InputError, match="would share the folder"):
        folders(["a/m.gguf", "a/m"], None)


@pytest.mark.parametrize("again", ["a/ck", "a/../a/ck/", "./a/ck"])
def test_the_same_model_twice_is_refused(again):
    with pytest.raises(InputError, match="given twice"):
        folders(["a/ck", again], None)


def test_hub_ids_that_make_one_name_are_refused():
    with pytest.raises(InputError, match="org/x and org-x would share the folder org-x"):
        folders(["org/x", "org-x"], None)


def test_a_folder_that_cannot_be_made_is_refused_before_any_work(tmp_path):
    from unembed.cli._folders import check_writable

    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InputError, match="is a file; give a folder"):
            check_writable(folder)
    check_writable(tmp_path / "new" / "below")
    assert not (tmp_path / "new").exists()
