"""Sums over tokens whose gradients are made in the same pass, for what asks for one number in the end."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from unembed.ops._joined import Joined, added
from unembed.ops._rows import Pullback, Rows, Tensors, Wanted, as_function, chunks, vjp


class Summed(Rows):
    """A single sum over tokens whose gradients `run` makes in the same pass, for what asks for one number in the end.

    `run` returns as kept the gradients of the asked inputs, in their order, for an upstream gradient of 1; those of
    shared inputs in float32 or wider.

    Args:
        chunk: Tokens at a time.
        asked: Inputs whose gradients to make.
    """

    def __init__(self, chunk: int, asked: Wanted) -> None:
        super().__init__(chunk, 0, 1)
        self.asked = asked

    def run(self, tokens: Tensors, shared: Tensors) -> tuple[Tensors, Tensors, Tensors]:
        """By differentiating the definition, one chunk after the other."""
        count, total, sums = sum(self.asked[0]), None, []
        of_tokens = Joined(len(tokens[0]))
        for part in chunks(tokens, self.chunk):
            definition, primals = as_function(self, part, shared, self.asked)
            (value,), back = vjp(definition, *primals) if primals else (definition(), None)
            gradients = () if back is None else back((torch.ones_like(value),))
            total = value if total is None else total + value
            of_tokens.add(gradients[:count])
            sums = added(sums, gradients[count:])
        assert total is not None
        return (), (total,), (*of_tokens.whole(), *sums)

    def pullback(self, wanted: Wanted, outputs: Tensors, kept: Tensors) -> tuple[Rows, Tensors, Tensors]:
        """From what the pass made, where that is all that is wanted."""
        count = sum(self.asked[0])
        return _Made(self, wanted), kept[:count], kept[count:]

    def made(self, wanted: Wanted) -> bool:
        """Whether `run` made all that is wanted."""
        pairs = zip(sum(wanted, ()), sum(self.asked, ()), strict=True)
        return all(made or not want for want, made in pairs)

    def given_away(self, wanted: Wanted, kept: Tensors, upstream: Tensor, inputs: Tensors) -> Iterator[Tensor]:
        """The wanted gradients in the memory they were made in: a second matrix of that size costs time."""
        given = iter(kept)
        scale = upstream.device.type != "cpu" or bool(upstream != 1)
        for one, made, want in zip(inputs, sum(self.asked, ()), sum(wanted, ()), strict=True):
            part = next(given).data if made else None  # `.data`: autograd need not know, see `spent`
            if want and part is not None:
                yield (part.mul_(upstream) if scale else part).to(one.dtype)


class _Made(Pullback):
    """The gradients that a `Summed` made, times the upstream one."""

    def run(self, tokens: Tensors, shared: Tensors) -> tuple[Tensors, Tensors, Tensors]:
        """Nothing is left to do but to scale."""
        assert isinstance(self.function, Summed)
        asked, wanted = self.function.asked, self.wanted
        if not self.function.made(wanted):
            return super().run(tokens, shared)
        count, count_shared = map(len, wanted)
        upstream, *made_shared = shared[count_shared:]
        found = []
        for inputs, asks, wants, made in (
            (tokens[:count], asked[0], wanted[0], tokens[count:]),
            (shared[:count_shared], asked[1], wanted[1], made_shared),
        ):
            given = iter(made)
            pairs = [
                (one, next(given) if ask else None, want) for one, ask, want in zip(inputs, asks, wants, strict=True)
            ]
            found.append(
                tuple((part * upstream).to(one.dtype) for one, part, want in pairs if want and part is not None)
            )
        return found[0], found[1], ()
