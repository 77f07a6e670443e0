"""Gumbel noise on a tree of tokens: that of a node is a function of the request's seed and the tokens that lead to it.

Shapes: n nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from unembed.decoding._plan import Plan
from unembed.ops import Stream, gumbel_noise, uniforms

_BITS = 53
_ROOT, _CHILD, _KEY = range(3)  # attempts: what a number is for


class TreeNoise:
    """Keys of the nodes of a search, and the noise of their children.

    With seeds, neither the other prompts nor the number of hypotheses matter: a wider search finds what a narrower one
    found, and more. Without, PyTorch's generator gives numbers in the order in which nodes are looked at.

    Args:
        plan: Seeds or a generator.
    """

    def __init__(self, plan: Plan) -> None:
        self._generator = plan.generator
        self._keys = None if plan.seeds is None else plan.seeds.copy()
        self._count = len(plan.prompts)

    def roots(self) -> Float[Tensor, " n"]:
        """Noise of the prompts themselves."""
        if self._keys is None:
            return self._generated(self._count)
        return _gumbel(uniforms(self._keys, stream=Stream.NOISE, attempt=_ROOT))

    def children(self, width: int) -> Float[Tensor, "n V"]:
        """Noise of all tokens after each node."""
        if self._keys is None:
            return self._generated(self._count, width)
        keys, tokens = np.repeat(self._keys, width), np.tile(np.arange(width), self._count)
        return _gumbel(uniforms(keys, tokens, stream=Stream.NOISE, attempt=_CHILD)).view(self._count, width)

    def advance(self, parents: Sequence[int], tokens: Sequence[int]) -> None:
        """Go on with some nodes, each by a token."""
        self._count = len(parents)
        if self._keys is not None:
            drawn = uniforms(
                self._keys[list(parents)], np.array(tokens, dtype=np.int64), stream=Stream.NOISE, attempt=_KEY
            )
            self._keys = (drawn * 2.0**_BITS).astype(np.uint64)

    def _generated(self, *shape: int) -> Tensor:
        place = torch.device("cpu") if self._generator is None else self._generator.device
        return gumbel_noise(torch.empty(shape, dtype=torch.float64, device=place), self._generator).cpu()


def _gumbel(uniform: np.ndarray) -> Float[Tensor, " n"]:
    """`-log E`, E exponential, from multiples of 2^-53; half of that is added, so E is never 0, nor infinite."""
    inside = np.minimum(uniform + 2.0 ** -(_BITS + 1), 1 - 2.0**-_BITS)
    return torch.from_numpy(-np.log(-np.log1p(-inside)))
