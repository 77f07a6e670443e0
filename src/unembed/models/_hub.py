"""Fetch from the Hugging Face hub what the head needs, and nothing else."""

from __future__ import annotations

import re
import time
from pathlib import Path

from unembed.models._safetensors import INDEX, SINGLE, Checkpoint
from unembed.models._tokens import FILES
from unembed.results import InputError
from unembed.text import one_line, quiet_loggers

_COMMIT = re.compile(r"[0-9a-f]{40}")
_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_LOGGERS = ("huggingface_hub", "httpx", "httpx2", "urllib3")
_SECONDS = 10  # to wait for the first answer


def is_hub_id(source: str) -> bool:
    """Whether `source` has the form of a model id: `name` or `owner/name`, and no file's ending."""
    return _ID.fullmatch(source) is not None and not source.endswith(
        (".safetensors", ".gguf", ".json", ".bin", ".pt", ".pth")
    )


def is_on_hub(source: object) -> bool:
    """Whether `source` will be looked up on the hub: it has the form of a model id and is no path here."""
    return isinstance(source, str) and not Path(source).expanduser().exists() and is_hub_id(source)


def resolve_revision(source: object, revision: str | None) -> str | None:
    """The commit that `revision` of a hub id means now, so that all that is read of it is of one commit.

    The hub is asked, and the cache where the hub cannot be reached; config.json is fetched for it.

    Args:
        source: What the user gave: a path, a hub id or a model.
        revision: Branch, tag or commit; the main branch when None.

    Returns:
        40 hex digits; `revision` as it came where no commit is to be had; None for what is here already.

    Raises:
        InputError: If the model cannot be had.
    """
    if not isinstance(source, str) or not is_on_hub(source):
        return None
    if revision is not None and _COMMIT.fullmatch(revision):
        return revision
    commit = HubModel(source, revision).config().parent.name  # .../snapshots/COMMIT/config.json
    return commit if _COMMIT.fullmatch(commit) else revision


class HubModel:
    """A model on the hub; files come from the cache where they are in it (`HF_HUB_OFFLINE=1` asks for that alone).

    Args:
        repo_id: `owner/name`.
        revision: Branch, tag or commit; the main branch when None.
    """

    def __init__(self, repo_id: str, revision: str | None) -> None:
        try:
            import huggingface_hub
            import huggingface_hub.constants
            import huggingface_hub.errors
        except ImportError:
            raise InputError(
                f'{repo_id} is no file or folder here, and a hub id needs huggingface_hub: pip install "unembed[hf]".'
            ) from None
        self._hub = huggingface_hub
        self.repo_id = repo_id
        self.revision = revision
        self._answered = False

    def fetch(self, name: str) -> Path:
        """The local path of a file.

        Raises:
            InputError: If it cannot be had.
        """
        path, why = self._try(name)
        if path is None:
            raise InputError(f"{self.repo_id}: could not get {name} from the hub ({why}).")
        return path

    def config(self) -> Path:
        """The path of config.json; the first contact, so its error says what may be wrong."""
        path, why = self._try("config.json")
        if path is None:
            raise InputError(
                f"{self.repo_id} is no file or folder here, and as a hub id it gave no config.json ({why}); "
                "check the name, the connection, or a login for gated models."
            )
        return path

    def checkpoint(self) -> Checkpoint:
        """Names of the tensors; shards are fetched when one of their tensors is read."""
        index, _ = self._try(INDEX)
        if index is not None:
            return Checkpoint.of_index(index, self.fetch)
        path, why = self._try(SINGLE)
        if path is None:
            raise InputError(
                f"{self.repo_id}: no {SINGLE} and no {INDEX} on the hub ({why}); "
                "download a GGUF file of the model and give its path, or convert the weights to safetensors."
            )
        return Checkpoint.of_file(path)

    def tokenizer(self) -> Path | None:
        """The folder with the tokenizer files that exist."""
        found = None
        for name in FILES:
            path, _ = self._try(name)
            found = found or (path and path.parent)
            if name == "tokenizer.json" and path is not None:
                break
        return found

    def _try(self, name: str) -> tuple[Path | None, str]:
        """Path of a file, or None and the reason in one line."""
        with quiet_loggers(*_LOGGERS):
            try:
                self._contact(name)
                return Path(self._hub.hf_hub_download(self.repo_id, name, revision=self.revision)), ""
            except Exception as error:  # httpx, the hub and the file system each have their own
                return None, f"{type(error).__name__}: {one_line(error)}"

    def _contact(self, name: str) -> None:
        """Ask for a file's size before the first download, twice at most: the download itself tries for half a minute.

        A mistyped path looks like an id, so the hub that does not answer is the common case, not the rare one.
        """
        hub = self._hub
        cached = isinstance(hub.try_to_load_from_cache(self.repo_id, name, revision=self.revision), str)
        if self._answered or cached or hub.constants.HF_HUB_OFFLINE:
            return
        url = hub.hf_hub_url(self.repo_id, name, revision=self.revision)
        try:
            hub.get_hf_file_metadata(url, timeout=_SECONDS)
        except Exception as error:  # a connection that failed, by whichever library, or an answer
            status = getattr(getattr(error, "response", None), "status_code", 503)
            if status < 500 and status != 429:
                raise
            time.sleep(1)
            hub.get_hf_file_metadata(url, timeout=_SECONDS)
        self._answered = True
