"""The sums of an unfinished run, kept in a file so that the next run goes on from there."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from unembed.diagnostics import Accumulator
from unembed.results import InputError, write_whole

_SECONDS = 60.0


class Progressed:
    """Keeps the state of accumulators in a safetensors file, about once a minute.

    Args:
        path: The file; None keeps nothing.
        identity: What the run was asked; a file of another run is refused.
        accumulators: Whose sums are kept.
    """

    def __init__(self, path: Path | None, identity: dict[str, Any], accumulators: Sequence[Accumulator]) -> None:
        self._path = path
        self._identity = json.dumps(identity, sort_keys=True)
        self._accumulators = accumulators
        self._last = time.monotonic()
        self._snapshot: tuple[int, dict[str, Any]] | None = None

    def restore(self) -> int:
        """Predictions that are in the file already, their sums restored; 0 without a file.

        Raises:
            InputError: If the file belongs to another run or is none of ours.
        """
        if self._path is None or not self._path.exists():
            return 0
        try:
            with safe_open(self._path, "pt") as file:
                about = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        except SafetensorError as error:
            raise InputError(f"{self._path}: not a file of an interrupted audit ({error}); remove it.") from error
        if about.get("identity") != self._identity:
            raise InputError(
                f"{self._path}: kept by an audit of another model, text or options; remove it or repeat that audit."
            )
        for accumulator in self._accumulators:
            prefix = f"{accumulator.name}/"
            accumulator.load_state(
                {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            )
        return int(about["done"])

    def keep(self, done: int) -> None:
        """Take a snapshot of the sums after `done` predictions; write it if none was written for a minute."""
        if self._path is None:
            return
        tensors = {
            f"{accumulator.name}/{name}": tensor.contiguous()
            for accumulator in self._accumulators
            for name, tensor in accumulator.state().items()
        }
        self._snapshot = (done, tensors)
        if time.monotonic() - self._last >= _SECONDS:
            self.write()

    def write(self) -> None:
        """Write the last snapshot. After an interrupt the sums themselves may be half a chunk ahead of it."""
        if self._path is None or self._snapshot is None:
            return
        done, tensors = self._snapshot
        with write_whole(self._path, "wb") as file:
            file.write(save(tensors, metadata={"identity": self._identity, "done": str(done)}))
        self._last = time.monotonic()
