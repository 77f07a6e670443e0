"""Write a file, or a folder of files, whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def write_whole(path: Path, mode: str = "w") -> Generator[IO]:
    """Open a temporary file beside `path` that becomes `path` only when the block ends without an error.

    Args:
        path: Where the finished file goes; missing folders are made.
        mode: `"w"` for UTF-8 text, `"wb"` for bytes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _uninterrupted() -> Generator[None]:
    """Put off Ctrl-C for some renames; only the main thread can, and only it is interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Stage:
    """Files written aside, to take their places together.

    Args:
        place: Temporary folder that holds them.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self.names: list[str] = []
        self.dropped: list[str] = []

    def text(self, name: str, content: str) -> None:
        """Stage a UTF-8 text file; a lone surrogate is written as its escape."""
        with self.open(name) as file:
            file.write(content.encode("utf-8", errors="backslashreplace"))

    @contextlib.contextmanager
    def open(self, name: str) -> Generator[IO[bytes]]:
        """Stage a binary file."""
        path = self.place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        self.names.append(name)

    def drop(self, names: Iterable[str]) -> None:
        """Remove these files when the staged ones take their places."""
        self.dropped += names


@contextlib.contextmanager
def replace_together(folder: Path) -> Generator[Stage]:
    """Stage files in a temporary folder inside `folder`; they move to their places only when the block ends well.

    A full disk or an interrupt while writing leaves `folder` as it was; one that did not exist is not left behind.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    place: Path | None = None
    done = False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        place = Path(tempfile.mkdtemp(dir=folder, prefix=".unembed-"))
        stage = Stage(place)
        yield stage
        for name in stage.names:  # what stands in the way is met before anything moves
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if (folder / name).is_dir():
                raise IsADirectoryError(f"{folder / name} is a folder, a file is to be written there.")
        with _uninterrupted():
            for name in stage.names:
                (place / name).replace(folder / name)
        for name in stage.dropped:
            (folder / name).unlink(missing_ok=True)
        done = True
    finally:
        if place is not None:
            shutil.rmtree(place, ignore_errors=True)
        if not done:
            with contextlib.suppress(OSError):  # not empty: not ours to remove
                for path in missing:
                    path.rmdir()
