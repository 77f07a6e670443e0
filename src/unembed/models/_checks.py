"""Integrity checks of a loaded head: the table of codes, and the checks that read values.

Shapes: V rows, D hidden size.
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unembed.models._norm import FinalNorm
from unembed.results import Check, IntegrityError

CODES = {
    "UNE001": "The files are whole: every shard is there and as long as its header says.",
    "UNE002": "The head tensor was found, and how it is tied to the embedding.",
    "UNE003": "The width of the head is the hidden size of the config.",
    "UNE004": "Every number of the head, its bias and the norm is finite.",
    "UNE005": "The rows are not zero.",
    "UNE006": "Rows of the head against ids of the tokenizer and `vocab_size` of the config.",
    "UNE007": "What the rows beyond the tokenizer hold.",
    "UNE008": "Ids below the tokenizer's size that have no token.",
    "UNE009": "The final norm is known.",
    "UNE010": "Scale and soft-cap of the scores.",
    "UNE011": "How the numbers are stored, and how they were widened.",
}
_CHUNK_ELEMENTS = 1 << 20  # part of the hash: another number is another hash of the same head


def require(check: Check) -> Check:
    """`check` itself unless it failed.

    Raises:
        IntegrityError: If its status is `failed`.
    """
    if check.status == "failed":
        raise IntegrityError(f"{check.message} [{check.code}]")
    return check


@dataclass(frozen=True)
class Scan:
    """One pass over a matrix as float32: digests of its values, and the largest magnitude of each row."""

    digests: bytes
    magnitudes: Float[Tensor, " V"]

    @classmethod
    def of(cls, weight: Float[Tensor, "V D"]) -> Scan:
        """Read `weight` in chunks of rows, a few at a time in threads (hashlib and torch release the lock)."""
        rows = max(1, _CHUNK_ELEMENTS // max(1, weight.shape[1]))
        # Filled in place: a small tensor kept from each chunk would pin the chunk's freed memory.
        magnitudes = torch.empty(weight.shape[0])

        def read(start: int) -> bytes:
            # no_grad is a setting of the thread, and parameters of a model come in here.
            with torch.no_grad():
                # Adding zero turns -0 into 0, which compare equal.
                values = weight[start : start + rows].to("cpu", torch.float32, copy=True).contiguous().add_(0.0)
                digest = hashlib.sha256(values.numpy().data.cast("B")).digest()
                torch.amax(values.abs_(), dim=1, out=magnitudes[start : start + rows])
                return digest

        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            digests = b"".join(pool.map(read, range(0, weight.shape[0], rows)))
        return cls(digests, magnitudes)


def content_hash(scan: Scan, weight: Tensor, bias: Tensor | None, norm: FinalNorm | None) -> str:
    """SHA-256 of head, bias and norm as float32 values: the same head has one hash in every file format.

    The norm's eps is left out, because formats store it with different precision.
    """
    whole = hashlib.sha256(f"unembed head 1 {tuple(weight.shape)}".encode())
    whole.update(scan.digests)
    for name, part in _vectors(bias, norm).items():
        whole.update(name.encode() + part.detach().cpu().to(torch.float32).add(0.0).contiguous().numpy().tobytes())
    whole.update((norm.kind if norm else "none").encode())
    return whole.hexdigest()


def check_values(
    scan: Scan, weight: Float[Tensor, "V D"], bias: Tensor | None, norm: FinalNorm | None, where: str
) -> list[Check]:
    """UNE003 to UNE005 for the whole head; `where` names the tensor and the file."""
    for name, part in _vectors(bias, norm).items():
        expected = (weight.shape[0 if name == "bias" else 1],)
        if part.shape != expected:
            message = (
                f"{where}: the {name} has shape {tuple(part.shape)}, expected {expected}; they are not of one model"
            )
            return [Check("UNE003", "failed", message)]
    broken = (~torch.isfinite(scan.magnitudes)).nonzero().flatten()
    if len(broken):
        message = (
            f"{where}: {_count(len(broken), 'row')} with NaN or infinity, first {_ids(broken)}; save the model again"
        )
        return [Check("UNE004", "failed", message)]
    for name, part in _vectors(bias, norm).items():
        if not torch.isfinite(part).all():
            return [Check("UNE004", "failed", f"{where}: the {name} holds NaN or infinity; save the model again")]
    zero = (scan.magnitudes == 0).nonzero().flatten()
    if len(zero) == len(scan.magnitudes):
        message = f"{where}: all {len(zero)} rows are zero, so the head was never filled; save the model again"
        return [Check("UNE004", "ok", f"{where}: finite"), Check("UNE005", "failed", message)]
    return [Check("UNE004", "ok", f"{where}: all {len(scan.magnitudes)} rows are finite.")]


def check_zero_rows(scan: Scan, real_rows: int) -> Check:
    """UNE005: zero rows among those that carry a token."""
    zero = (scan.magnitudes[:real_rows] == 0).nonzero().flatten()
    if not len(zero):
        return Check("UNE005", "ok", f"None of the {real_rows} rows that carry a token is zero.")
    return Check("UNE005", "warning", f"{_count(len(zero), 'row')} that carry a token are zero, first {_ids(zero)}.")


def check_vocabulary(rows: int, tokens: int | None, config_says: int | None, holes: tuple[int, ...]) -> list[Check]:
    """UNE006 and UNE008."""
    said = "" if config_says is None else f", the config says vocab_size {config_says}"
    numbers = f"The head has {rows} rows{said}"
    if tokens is None:
        message = f"{numbers}, no tokenizer was found: rows without a token are not known; give `tokenizer`."
        return [Check("UNE006", "skipped", message)]
    numbers += f", the tokenizer has {tokens} ids"
    if tokens > rows:
        checks = [Check("UNE006", "warning", f"{numbers}: ids from {rows} on have no row and cannot be produced.")]
    elif tokens < rows:
        message = (
            f"{numbers} and its count is used: {_count(rows - tokens, 'padding row')}, ids {tokens} to {rows - 1}."
        )
        checks = [Check("UNE006", "note", message)]
    else:
        checks = [Check("UNE006", "ok" if config_says in (None, rows) else "note", f"{numbers}.")]
    message = f"Every id below {tokens} has a token."
    if holes:
        message = f"{_count(len(holes), 'id')} below {tokens} without a token, first {_ids(torch.tensor(holes[:5]))}."
    return [*checks, Check("UNE008", "note" if holes else "ok", message)]


def check_padding(weight: Float[Tensor, "V D"], scan: Scan, real_rows: int) -> Check | None:
    """UNE007: zero, identical or of their own; None without padding rows."""
    rows = weight.shape[0]
    if real_rows >= rows:
        return None
    padding = weight[real_rows:].detach().cpu().float()
    first = ", ".join(str(i) for i in range(real_rows, min(rows, real_rows + 5)))
    what = f"{_count(len(padding), 'padding row')} ({first}{', ...' if rows - real_rows > 5 else ''})"
    zero = int((scan.magnitudes[real_rows:] == 0).sum())
    if zero == len(padding):
        return Check(
            "UNE007", "note", f"{what}: all zero, so each scores 0 (plus a bias) and beats every negative score."
        )
    norms = torch.linalg.vector_norm(padding, dim=1)
    sample = weight[torch.linspace(0, real_rows - 1, min(real_rows, 4096)).long().to(weight.device)]
    typical = torch.linalg.vector_norm(sample.detach().cpu().float(), dim=1).median().item()
    sizes = f"norms {norms.min().item():.3g} to {norms.max().item():.3g}, median of the real rows {typical:.3g}"
    if len(padding) > 1 and bool((padding == padding[0]).all()):
        return Check("UNE007", "note", f"{what}: all identical, {sizes}.")
    return Check("UNE007", "note", f"{what}: {zero} zero, the others of their own, {sizes}.")


def _vectors(bias: Tensor | None, norm: FinalNorm | None) -> dict[str, Tensor]:
    """Bias of the head, gain and bias of the norm: those that are there."""
    found = {} if bias is None else {"bias": bias}
    return found | {f"norm {name}": tensor for name, tensor in (norm.tensors if norm else {}).items()}


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _ids(ids: Tensor) -> str:
    return ", ".join(str(i) for i in ids[:5].tolist())
