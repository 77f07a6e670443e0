"""Measurements on a head: each an accumulator with `update`, `merge` and `result`."""

from unembed.diagnostics._accumulator import Accumulator
from unembed.diagnostics._chunk import Chunk, Workspace, chunks, full_precision
from unembed.diagnostics._coefficients import Coefficients
from unembed.diagnostics._effective import effective_ranks
from unembed.diagnostics._gradient import Gradient
from unembed.diagnostics._head import LinearHead
from unembed.diagnostics._head_gradient import HeadGradient
from unembed.diagnostics._logprob_rank import LogprobRank
from unembed.diagnostics._saturation import Saturation
from unembed.diagnostics._spectrum import Spectrum

__all__ = [
    "Accumulator",
    "Chunk",
    "Coefficients",
    "Gradient",
    "HeadGradient",
    "LinearHead",
    "LogprobRank",
    "Saturation",
    "Spectrum",
    "Workspace",
    "chunks",
    "effective_ranks",
    "full_precision",
]
