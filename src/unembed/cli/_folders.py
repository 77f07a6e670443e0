"""Where the results of each model go: a folder each, told apart before any work."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from unembed.results import InputError, safe_name


def folders(models: Sequence[str], out: Path | None) -> list[tuple[str | None, Path]]:
    """Every model with its folder: `out`, or one below it for each of several; `out/NAME` where none is given.

    Raises:
        InputError: If a model is given twice, or two names are the same as names of folders.
    """
    if not models:
        return [(None, out or Path("out") / "demonstration")]
    if len(models) == 1 and out is not None:
        return [(models[0], out)]
    return [(model, (out or Path("out")) / name) for model, name in zip(models, _names(models), strict=True)]


def check_writable(folder: Path, option: str = "--out") -> None:
    """Refuse before any work what would fail at its end.

    Raises:
        InputError: If `folder` is a file, lies below one, or cannot be made or written.
    """
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not place.is_dir():
        raise InputError(f"{option} {folder}: {place} is a file; give a folder.")
    if not os.access(place, os.W_OK | os.X_OK):
        raise InputError(f"{option} {folder}: {place} cannot be written to; give another folder.")


def _names(models: Sequence[str]) -> list[str]:
    """The last part of each path, with as many parents in front as make it the only one; hub ids are whole.

    A GGUF file gives its name without the ending: a folder called `x.gguf` would be taken for a model.
    """
    paths = [Path(model).resolve() if Path(model).exists() else None for model in models]
    parts = [
        (model,) if path is None else (path.with_suffix("") if path.suffix.lower() == ".gguf" else path).parts
        for model, path in zip(models, paths, strict=True)
    ]
    for place, model in enumerate(models):
        same = [other for other in range(place) if (paths[other] or models[other]) == (paths[place] or model)]
        if same:
            raise InputError(f"{model} is given twice; name each model once.")
    depths = [1] * len(models)
    while True:
        names = [safe_name("-".join(part[-depth:])) for part, depth in zip(parts, depths, strict=True)]
        folded = [name.casefold() for name in names]  # some file systems take A and a for one name
        alike = [place for place, name in enumerate(folded) if folded.count(name) > 1]
        if not alike:
            return names
        longer = [place for place in alike if depths[place] < len(parts[place])]
        if not longer:
            both = " and ".join(models[place] for place in alike if folded[place] == folded[alike[0]])
            raise InputError(f"{both} would share the folder {names[alike[0]]}; audit them one by one with --out.")
        for place in longer:
            depths[place] += 1
