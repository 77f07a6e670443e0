"""The texts: which docstrings are kept, in which order, and that nothing held out is among them."""

import hashlib

from unembed.experiments import docstring_documents, held_out_documents, text_sha256

PASSAGE = "one two three four five six seven eight nine ten eleven twelve"


def _write(root, files):
    for name, source in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")


def test_modules_come_by_path_and_docstrings_by_line_without_indentation(tmp_path):
    source = '''"""The module is described here."""
class Outer:
    """The class is described here.

    With a second paragraph.
    """
    async def inner(self):
        """The method is described here."""
def late():
    """The function is described here."""
    value = """Not a docstring, so left out."""
'''
    _write(tmp_path, {"b/x.py": '"""The second module of the two."""', "a.py": source, "empty.py": "x = 1"})
    assert docstring_documents(root=tmp_path) == [
        "The module is described here.\n\nThe class is described here.\n\nWith a second paragraph.\n\n"
        "The method is described here.\n\nThe function is described here.\n",
        "The second module of the two.\n",
    ]


def test_repeats_short_and_foreign_docstrings_are_dropped(tmp_path):
    _write(
        tmp_path,
        {
            "a.py": '"""The same words in two places."""',
            "b.py": '"""The same words in two places."""',
            "c.py": '"""Nineteen letters..."""',
            "d.py": '"""Ελληνικά γράμματα εδώ και εκεί."""',
            "e.py": '"""One letter ü in a line of English words is fine."""',
        },
    )
    assert docstring_documents(root=tmp_path) == [
        "The same words in two places.\n",
        "One letter ü in a line of English words is fine.\n",
    ]


def test_tests_and_installed_packages_are_left_out(tmp_path):
    names = ["test/a.py", "json/tests/a.py", "idlelib/idle_test/a.py", "lib2to3/a.py", "pydoc_data/a.py"]
    names += ["site-packages/a.py", "dist-packages/b/a.py"]
    _write(tmp_path, {name: f'"""The docstring of {name}, of length."""' for name in [*names, "test.py", "tests.py"]})
    assert docstring_documents(root=tmp_path) == [
        "The docstring of test.py, of length.\n",
        "The docstring of tests.py, of length.\n",
    ]


def test_a_docstring_with_twelve_words_of_the_held_out_text_is_dropped(tmp_path):
    eleven = PASSAGE.rsplit(" ", 1)[0]
    _write(tmp_path, {"a.py": f'"""Before {PASSAGE} after."""', "b.py": f'"""Before {eleven} after."""'})
    held_out = [f"A document.\n{PASSAGE.replace(' ', chr(10))} and more."]
    assert docstring_documents(root=tmp_path, held_out=held_out) == [f"Before {eleven} after.\n"]
    assert len(docstring_documents(root=tmp_path)) == 2


def test_held_out_documents_are_all_topics_by_name():
    from pydoc_data.topics import topics

    documents = held_out_documents()
    assert documents[0] == topics["assert"]
    assert sorted(documents) == sorted(topics.values())


def test_sha256_tells_where_documents_end():
    assert text_sha256(["ab", "c"]) == hashlib.sha256(b"ab\0c\0").hexdigest()
    assert text_sha256(["ab", "c"]) != text_sha256(["a", "bc"])
