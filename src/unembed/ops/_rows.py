"""Functions of tokens evaluated a chunk at a time, with derivatives of any order that are evaluated so too.

A `Rows` takes token tensors (first dimension N) and shared tensors to token outputs and to outputs that are summed over
tokens. Its derivatives, backward and forward, are of the same kind, so no order of differentiation holds more of what
lies between than a chunk. `run` may be fast; `__call__` is the definition, and what higher orders are made from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from unembed.ops._joined import Joined, added, is_batch

Tensors = tuple[Tensor, ...]
Wanted = tuple[tuple[bool, ...], tuple[bool, ...]]  # which token tensors and which shared tensors


class Rows:
    """A function `(token tensors, shared tensors) -> (token outputs, summed outputs)`.

    Args:
        chunk: Tokens at a time.
        outputs: Number of token outputs.
        sums: Number of summed outputs.
    """

    def __init__(self, chunk: int, outputs: int, sums: int) -> None:
        self.chunk = chunk
        self.outputs = outputs
        self.sums = sums

    def __call__(self, tokens: Tensors, shared: Tensors) -> tuple[Tensors, Tensors]:
        """The definition, in operations with derivatives; for a chunk of tokens."""
        raise NotImplementedError

    def run(self, tokens: Tensors, shared: Tensors) -> tuple[Tensors, Tensors, Tensors]:
        """The same for all tokens, without a graph, a chunk alive at a time; and what `pullback` may use again."""
        return *_in_chunks(self, tokens, shared, self.chunk), ()

    def pullback(self, wanted: Wanted, outputs: Tensors, kept: Tensors) -> tuple[Rows, Tensors, Tensors]:
        """The function from inputs and upstream gradients to the gradients of the wanted inputs.

        Its token tensors are those of this function, then the upstream gradients of floating point token outputs; its
        shared tensors are those of this function, then the upstream gradients of sums. Token tensors and shared tensors
        that are returned beside it, from `outputs` and `kept`, come last; they have no part in further derivatives.

        Args:
            wanted: Inputs whose gradients are asked for.
            outputs: Token outputs of `run`.
            kept: What `run` kept.
        """
        return Pullback(self, wanted), (), ()

    def made(self, wanted: Wanted) -> bool:
        """Whether `run` kept the wanted gradients themselves, as `Summed` does."""
        return False

    def given_away(self, wanted: Wanted, kept: Tensors, upstream: Tensor, inputs: Tensors) -> Iterator[Tensor]:
        """The wanted gradients out of what was `made`, whose memory goes with them."""
        raise NotImplementedError


def evaluate(function: Rows, tokens: Sequence[Tensor], shared: Sequence[Tensor] = ()) -> tuple[Tensors, Tensors]:
    """`function` of all tokens; floating point outputs have derivatives of any order, backward and forward.

    While torch.compile traces, chunks are plain operations under a checkpoint: Dynamo takes no custom `jvp`. On the
    meta device there are only shapes, so the definition gives them.
    """
    if tokens[0].is_meta:
        return function(tuple(tokens), tuple(shared))
    if torch.compiler.is_compiling():
        return _in_chunks(_recomputed(function), tuple(tokens), tuple(shared), function.chunk)
    flat = _Evaluate.apply(function, len(tokens), *tokens, *shared)
    return flat[: function.outputs], flat[function.outputs : function.outputs + function.sums]


class _Evaluate(torch.autograd.Function):
    @staticmethod
    def forward(function: Rows, count: int, *tensors: Tensor) -> Tensors:
        with torch.autocast(tensors[0].device.type, enabled=False):
            # A batch of gradients (`is_grads_batched`) comes as tensors that nothing may be done to in place.
            run = Rows.run if any(map(is_batch, tensors)) else type(function).run
            outputs, sums, kept = run(function, tensors[:count], tensors[count:])
        return (*outputs, *sums, *kept)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.function, ctx.count, *tensors = inputs
        ctx.inputs = len(tensors)
        ctx.spent = False
        results = ctx.function.outputs + ctx.function.sums
        ctx.differentiable = [place < results and part.is_floating_point() for place, part in enumerate(output)]
        silent = [part for part, has in zip(output, ctx.differentiable, strict=True) if not has]
        ctx.mark_non_differentiable(*silent)
        ctx.set_materialize_grads(False)  # what was kept is large, and zeros of its size would be made
        ctx.save_for_backward(*tensors, *output)
        ctx.save_for_forward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        inputs, output, function, count = _saved(ctx)
        asked = ctx.needs_input_grad[2:]
        if not any(asked):
            return (None,) * (2 + len(asked))
        wanted = (tuple(asked[:count]), tuple(asked[count:]))
        ups = [
            (place < function.outputs, torch.zeros_like(output[place]) if up is None else up)
            for place, up in enumerate(upstream)
            if ctx.differentiable[place]
        ]
        silent = [part.detach() for part in output]
        kept = tuple(silent[function.outputs + function.sums :])
        if ctx.spent:  # a graph that was kept: what was made is gone
            with torch.no_grad(), torch.autocast(inputs[0].device.type, enabled=False):
                kept = function.run(inputs[:count], inputs[count:])[2]
        if function.made(wanted) and _is_plain(ups[0][1]):
            ctx.spent = True
            gradients = iter(function.given_away(wanted, kept, ups[0][1], inputs))
            return (None, None, *(next(gradients) if want else None for want in asked))
        pullback, beside, beside_shared = function.pullback(wanted, tuple(silent[: function.outputs]), kept)
        tokens = (*inputs[:count], *(up for of_token, up in ups if of_token), *beside)
        shared = (*inputs[count:], *(up for of_token, up in ups if not of_token), *beside_shared)
        gradients = iter(sum(evaluate(pullback, tokens, shared), ()))
        return (None, None, *(next(gradients) if want else None for want in asked))

    @staticmethod
    def jvp(ctx: Any, *of_inputs: Any) -> tuple[Tensor | None, ...]:
        _function, _count, *tangents = of_inputs
        inputs, _, function, count = _saved(ctx)
        moved = tuple(tangent is not None for tangent in tangents)
        floating = [sum(ctx.differentiable[: function.outputs]), sum(ctx.differentiable[function.outputs :])]
        pushforward = _Pushforward(function, (moved[:count], moved[count:]), *floating)
        along = [tangent for tangent in tangents[:count] if tangent is not None]
        along_shared = [tangent for tangent in tangents[count:] if tangent is not None]
        found = evaluate(pushforward, (*inputs[:count], *along), (*inputs[count:], *along_shared))
        given = iter(sum(found, ()))
        return tuple(next(given) if has else None for has in ctx.differentiable)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> tuple[Tensors, Any]:
        """One example after the other: memory stays that of one, and no `run` need know of it."""
        function, count, *tensors = inputs
        results = []
        for place in range(info.batch_size):
            one = [
                tensor if dim is None else tensor.select(dim, place)
                for tensor, dim in zip(tensors, in_dims[2:], strict=True)
            ]
            results.append(_Evaluate.apply(function, count, *one))
        stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
        return stacked, tuple(0 for _ in stacked)


class Pullback(Rows):
    """Gradients of the wanted inputs, by differentiating the definition; the base of faster forms.

    Args:
        function: What is differentiated.
        wanted: Its inputs whose gradients are asked for.
    """

    def __init__(self, function: Rows, wanted: Wanted) -> None:
        super().__init__(function.chunk, sum(wanted[0]), sum(wanted[1]))
        self.function, self.wanted = function, wanted

    def __call__(self, tokens: Tensors, shared: Tensors) -> tuple[Tensors, Tensors]:
        count, count_shared = map(len, self.wanted)
        definition, primals = as_function(self.function, tokens[:count], shared[:count_shared], self.wanted)
        values, back = vjp(definition, *primals)
        of_tokens = len(values) - self.function.sums
        ups = (*tokens[count : count + of_tokens], *shared[count_shared : count_shared + self.function.sums])
        gradients = back(ups)
        return gradients[: self.outputs], gradients[self.outputs :]


class _Pushforward(Rows):
    """Tangents of the outputs from those of the moved inputs, by differentiating the definition."""

    def __init__(self, function: Rows, moved: Wanted, outputs: int, sums: int) -> None:
        super().__init__(function.chunk, outputs, sums)
        self._function, self._moved = function, moved

    def __call__(self, tokens: Tensors, shared: Tensors) -> tuple[Tensors, Tensors]:
        count, count_shared = map(len, self._moved)
        definition, primals = as_function(self._function, tokens[:count], shared[:count_shared], self._moved)
        # J t as the gradient of u -> J^T u along t: forward mode inside forward mode does not exist in PyTorch.
        values, back = vjp(definition, *primals)
        _, forth = vjp(lambda *up: back(up), *(torch.zeros_like(value) for value in values))
        tangents = forth((*tokens[count:], *shared[count_shared:]))
        return tangents[: self.outputs], tangents[self.outputs :]


def _is_plain(upstream: Tensor) -> bool:
    """Whether this is a backward pass of first order, under no transform of torch.func and no batch of gradients."""
    transformed = torch._C._are_functorch_transforms_active() or is_batch(upstream)
    return not torch.is_grad_enabled() and not transformed


def vjp(function: Callable[..., Tensors], *primals: Tensor) -> tuple[Tensors, Callable[..., Tensors]]:
    found: Any = torch.func.vjp(function, *primals)  # its type knows of a third part that comes with `has_aux`
    return found


def _saved(ctx: Any) -> tuple[Tensors, Tensors, Rows, int]:
    saved = ctx.saved_tensors
    return saved[: ctx.inputs], saved[ctx.inputs :], ctx.function, ctx.count


def as_function(
    function: Rows, tokens: Tensors, shared: Tensors, chosen: Wanted
) -> tuple[Callable[..., Tensors], Tensors]:
    """`function` of its chosen inputs alone with its floating point outputs alone, and those inputs."""
    flat, places = (*tokens, *shared), [place for place, choose in enumerate(sum(chosen, ())) if choose]

    def definition(*primals: Tensor) -> Tensors:
        filled = list(flat)
        for place, primal in zip(places, primals, strict=True):
            filled[place] = primal
        outputs, sums = function(tuple(filled[: len(tokens)]), tuple(filled[len(tokens) :]))
        return tuple(part for part in (*outputs, *sums) if part.is_floating_point())

    return definition, tuple(flat[place] for place in places)


def _recomputed(function: Rows) -> Callable[[Tensors, Tensors], tuple[Tensors, Tensors]]:
    """`function` with nothing saved for its derivative but its inputs."""

    def call(tokens: Tensors, shared: Tensors) -> tuple[Tensors, Tensors]:
        return checkpoint(function, tokens, shared, use_reentrant=False)

    return call


def _in_chunks(
    function: Callable[[Tensors, Tensors], tuple[Tensors, Tensors]], tokens: Tensors, shared: Tensors, chunk: int
) -> tuple[Tensors, Tensors]:
    outputs = Joined(len(tokens[0]))
    totals: list[Tensor] = []
    dtypes: list[torch.dtype] = []
    for part in chunks(tokens, chunk):
        found, sums = function(part, shared)
        outputs.add(found)
        dtypes = [piece.dtype for piece in sums]
        totals = added(totals, sums)
    return outputs.whole(), tuple(total.to(dtype) for total, dtype in zip(totals, dtypes, strict=True))


def chunks(tokens: Tensors, chunk: int) -> Iterator[Tensors]:
    """Chunks of all token tensors; without tokens one empty chunk, so that outputs have their shapes."""
    total = len(tokens[0])
    for start in range(0, max(total, 1), chunk):
        yield tuple(tensor[start : start + chunk] for tensor in tokens)
