r"""Singular values and column space of a tall matrix, with and without its row mean, in D x D memory.

With `mean` the mean row and `W_c = W - 1 mean^T = U S R^T`, the whole of `W` is
`[U, 1/sqrt(V)] [S R^T; sqrt(V) mean^T]`, because `U` is orthogonal to `1`. So one pass over `W_c` gives both spectra
and both column spaces, exactly.

Shapes: V rows (vocabulary), D columns, r numerical rank of `W_c`, q = r + 1, s numerical rank of `W`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

# A float64 Gram matrix squares the condition number: beyond this its smallest singular values keep fewer than 6 digits.
_GRAM_CONDITION = 1e5
# Singular values below this times ||W||_F are the rounding of our own float64 arithmetic.
_OWN_ROUNDING = 8 * torch.finfo(torch.float64).eps
_CHUNK_ELEMENTS = 1 << 20  # 8 MiB in float64: larger chunks cost more in fresh memory than in arithmetic


@dataclass(frozen=True)
class TallSVD:
    """Spectra of a tall matrix; singular values in descending order, all float64 on the CPU.

    Args:
        rows: V.
        mean: Mean row.
        values: Singular values of the row-centred matrix `W_c`.
        right: Right singular vectors of `W_c`, one a column.
        values_raw: Singular values of `W`.
        noise: Size of a singular value that rounding the entries to their stored dtype can produce.
        method: `gram`, or `qr` where the Gram matrix would have lost the small values.
    """

    rows: int
    mean: Float[Tensor, " D"]
    values: Float[Tensor, " D"]
    right: Float[Tensor, "D D"]
    values_raw: Float[Tensor, " D"]
    noise: float
    method: str

    @property
    def rank(self) -> int:
        """Singular values of `W_c` above `noise`."""
        return int((self.values > self.noise).sum())

    @property
    def rank_raw(self) -> int:
        """Singular values of `W` above `noise`."""
        return int((self.values_raw > self.noise).sum())


@dataclass(frozen=True)
class ColumnSpace:
    """Orthonormal bases of `col(W_c)` and `col(W)`.

    Args:
        centred: Basis of `col(W_c)`, float32 (float64 for a float64 matrix) on the matrix's device.
        raw: Coordinates of a basis of `col(W)` in the basis `[centred, 1/sqrt(V)]`, float64 on the CPU.
    """

    centred: Float[Tensor, "V r"]
    raw: Float[Tensor, "q s"]


def tall_svd(
    weight: Float[Tensor, "V D"] | Sequence[Float[Tensor, "_ D"]], *, noise_eps: float | None = None
) -> TallSVD:
    r"""Singular values of `W` and of `W - 1 mean^T`, and right singular vectors of the latter.

    Takes a float64 Gram matrix, and a chunked QR where the condition number asks for it.

    Args:
        weight: Any float dtype, whole or in blocks of rows; read in chunks and never copied whole.
        noise_eps: Relative spacing of the stored numbers; that of the dtype when None. The tolerance for ranks is
            `noise_eps * ||W||_F * (1/sqrt(D) + 1/sqrt(V)) / sqrt(3)`: twice the norm expected of a matrix of
            independent rounding errors, so a factorised matrix stored in bfloat16 has the rank of its factors. At
            least `8 eps(float64) * ||W||_F`, what the computation itself rounds off.

    Raises:
        ValueError: If the matrix is empty or holds a NaN or an infinity.
    """
    blocks = [weight] if isinstance(weight, Tensor) else list(weight)
    rows, width = sum(len(block) for block in blocks), blocks[0].shape[1]
    if rows == 0 or width == 0:
        raise ValueError(f"`weight` must have rows and columns, got shape {(rows, width)}.")
    mean = torch.zeros(width, dtype=torch.float64)
    for chunk in _chunks64(blocks):
        mean += chunk.sum(0).cpu()
    mean /= rows
    if not bool(torch.isfinite(mean).all()):
        raise ValueError("`weight` holds NaN or infinity.")

    gram = torch.zeros(width, width, dtype=torch.float64)
    for chunk in _chunks64(blocks, mean):
        gram += (chunk.T @ chunk).cpu()
    squares, right = torch.linalg.eigh(gram)
    values, right = squares.clamp(min=0).sqrt().flip(0), right.flip(1)
    method = "gram"
    if values[-1] * _GRAM_CONDITION < values[0]:
        _, values, right_t = torch.linalg.svd(thin_r(_chunks64(blocks, mean)).cpu(), full_matrices=False)
        values, right = _padded(values, width), _completed(right_t)
        method = "qr"

    stacked = torch.cat([values[:, None] * right.T, math.sqrt(rows) * mean[None]])
    frobenius = float(torch.linalg.matrix_norm(stacked))
    eps = torch.finfo(blocks[0].dtype).eps if noise_eps is None else noise_eps
    return TallSVD(
        rows=rows,
        mean=mean,
        values=values,
        right=right,
        values_raw=torch.linalg.svdvals(stacked)[:width],
        noise=frobenius * max(eps * (1 / math.sqrt(width) + 1 / math.sqrt(rows)) / math.sqrt(3), _OWN_ROUNDING),
        method=method,
    )


def column_space(weight: Float[Tensor, "V D"], svd: TallSVD) -> ColumnSpace:
    """Orthonormal bases of the column spaces of `weight`, at the numerical ranks of `svd`.

    The basis is made in float64 and rounded once, so what a float32 product with it loses does not grow with the
    condition number of `weight`.
    """
    rank = svd.rank
    shape, dtype = (weight.shape[0], rank), torch.promote_types(weight.dtype, torch.float32)
    centred = torch.empty(shape, dtype=dtype, device=weight.device)
    turn = svd.right[:, :rank] / svd.values[:rank]
    # The basis is orthonormal to eps * condition^2: below 1e-9 it need not be looked at.
    doubtful = rank > 0 and bool(svd.values[0] > 1e3 * svd.values[rank - 1])
    gram = torch.zeros(rank, rank, dtype=torch.float64)
    start = 0
    for chunk in _chunks64([weight], svd.mean):
        part = chunk @ turn.to(chunk.device)
        if doubtful:
            gram += (part.T @ part).cpu()
        centred[start : start + len(part)] = part.to(weight.device, dtype)
        start += len(part)
    coordinates = svd.values[:rank, None] * svd.right[:, :rank].T
    if doubtful:
        coordinates = _orthonormalised(centred, gram) @ coordinates

    stacked = torch.cat([coordinates, math.sqrt(svd.rows) * svd.mean[None]])
    left, _, _ = torch.linalg.svd(stacked, full_matrices=False)
    return ColumnSpace(centred, left[:, : min(svd.rank_raw, left.shape[1])])


def thin_r(chunks: Iterable[Float[Tensor, "_ D"]]) -> Float[Tensor, "k D"]:
    """Triangular factor of the QR decomposition of stacked chunks, holding one chunk at a time."""
    factor: Tensor | None = None
    for chunk in chunks:
        stacked = chunk if factor is None else torch.cat([factor, chunk.to(factor.device)])
        factor = torch.linalg.qr(stacked, mode="r").R
    if factor is None:
        raise ValueError("`chunks` must hold at least one chunk.")
    return factor


def _chunks64(blocks: Sequence[Tensor], mean: Tensor | None = None) -> Iterator[Tensor]:
    """Chunks of rows in float64, less `mean`; on the CPU where the device has no float64 (MPS)."""
    for block in blocks:
        device = torch.device("cpu") if block.device.type == "mps" else block.device
        for chunk in block.split(max(1, _CHUNK_ELEMENTS // block.shape[1])):
            wide = chunk.to(device).to(torch.float64, copy=True)
            yield wide if mean is None else wide.sub_(mean.to(device))


def _orthonormalised(basis: Tensor, gram: Tensor) -> Tensor:
    """Make `basis` orthonormal in place, given its Gram matrix; returns the root of that matrix."""
    squares, turn = torch.linalg.eigh(gram)
    roots = squares.clamp(min=1e-30).sqrt()
    mend = (turn / roots) @ turn.T
    for chunk in basis.split(max(1, _CHUNK_ELEMENTS // basis.shape[1])):
        chunk.copy_((chunk.cpu().to(torch.float64) @ mend).to(chunk.dtype))
    return (turn * roots) @ turn.T


def _padded(values: Tensor, width: int) -> Tensor:
    return torch.cat([values, values.new_zeros(width - len(values))])


def _completed(right_t: Tensor) -> Tensor:
    """Right singular vectors as a square orthogonal matrix, also where there were fewer rows than columns."""
    short = right_t.shape[1] - right_t.shape[0]
    if short == 0:
        return right_t.T
    full = torch.linalg.qr(right_t.T, mode="complete").Q
    return torch.cat([right_t.T, full[:, right_t.shape[0] :]], dim=1)
