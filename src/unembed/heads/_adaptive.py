"""Adaptive softmax (Grave et al., 2017, arXiv:1609.04309): frequent tokens at full width, rare ones in narrow clusters.

Shapes: n or * tokens, D hidden size, V vocabulary, S shortlist, C clusters, r_i width of tail i.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from unembed import ops
from unembed.heads._base import Head, uniform_
from unembed.heads._product import log_softmax, product
from unembed.ops import chunk_rows

_IGNORED = -1  # inside: the caller's `ignore_index` may be an entry of the first softmax


class AdaptiveSoftmax(Head):
    r"""$\log p(v) = \log p(\mathrm{entry}(v)) + \log p(v \mid \mathrm{cluster}(v))$, the second term for clusters only.

    The first softmax is over the S tokens below the first cutoff and one entry a cluster; tokens of cluster i share a
    second one, with scores $T_i P_i h$. Tokens are taken to be numbered from frequent to rare.

    `weight` is [S, D], so nothing of [V, D] can be tied to it. What can be tied are the parts of an adaptive embedding
    (Baevski and Auli, 2019, arXiv:1809.10853), which have the same shapes: see `tie`.

    Args:
        in_features: D.
        out_features: V.
        cutoffs: First token of each cluster, increasing, in [1, V); `(V // 20, V // 5)` when None. Without any it is a
            plain softmax.
        div_value: Tail i (from 1) has width `D / div_value^i`, rounded down, at least 1.
        bias: Whether the first softmax has a bias.
        device: Where the parameters are.
        dtype: Of the parameters.
    """

    names = ("adaptive",)
    not_applicable: ClassVar[dict[str, str]] = {
        "func_vmap": "tokens are sorted by cluster, so shapes depend on the targets, which vmap cannot follow"
    }
    normalised = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        cutoffs: Sequence[int] | None = None,
        div_value: float = 4.0,
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features)
        if not div_value >= 1:
            raise ValueError(f"`div_value` must be at least 1, got {div_value}.")
        self.cutoffs = _checked(cutoffs, out_features)
        self.div_value = div_value
        edges = [*self.cutoffs, out_features]
        self.spans = list(itertools.pairwise(edges))  # first token of each cluster, and the token after its last
        like = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(edges[0], in_features, **like))
        self.clusters = nn.Parameter(torch.empty(len(self.spans), in_features, **like))
        self.bias = nn.Parameter(torch.empty(edges[0] + len(self.spans), **like)) if bias else None
        widths = [max(1, int(in_features / div_value**place)) for place in range(1, len(edges))]
        self.projections = nn.ParameterList([nn.Parameter(torch.empty(width, in_features, **like)) for width in widths])
        self.tails = nn.ParameterList(
            [
                nn.Parameter(torch.empty(stop - start, width, **like))
                for (start, stop), width in zip(self.spans, widths, strict=True)
            ]
        )
        self.reset_parameters()

    def options(self) -> dict[str, Any]:
        """As given to `__init__`, with the cutoffs chosen."""
        return {"cutoffs": list(self.cutoffs), "div_value": self.div_value, "bias": self.bias is not None}

    def reset_parameters(self) -> None:
        """Draw all as `nn.Linear` does."""
        for matrix in (self.weight, self.clusters, *self.projections, *self.tails):
            uniform_(matrix, matrix.shape[1])
        if self.bias is not None:
            uniform_(self.bias, self.in_features)

    def tie(self, embeddings: Sequence[nn.Parameter], projections: Sequence[nn.Parameter] | None = None) -> None:
        """Use the parameters of an adaptive embedding: `[S, D]`, then `[size_i, r_i]` of each cluster.

        Args:
            embeddings: One a part of the vocabulary, from frequent to rare.
            projections: `[r_i, D]` of each cluster, where they too are shared.

        Raises:
            ValueError: If their number or a shape does not fit.
        """
        matrices = [self.weight, *self.tails]
        pairs = [("embeddings", embeddings, matrices)]
        if projections is not None:
            pairs.append(("projections", projections, [*self.projections]))
        for name, given, own in pairs:
            came, expected = ([tuple(one.shape) for one in matrices] for matrices in (given, own))
            if came != expected:
                raise ValueError(f"`{name}` must have shapes {expected}, got {came}.")
        self.weight = embeddings[0]
        for place, one in enumerate(embeddings[1:]):
            self.tails[place] = one
        for place, one in enumerate(projections or ()):
            self.projections[place] = one

    @property
    def rank_bound(self) -> int | None:
        """D + 1 + C, one more for a bias: scores are linear, and each softmax takes off one number a token."""
        return min(self.in_features + 1 + len(self.spans) + (self.bias is not None), self.out_features)

    def real_classes(self) -> Tensor | None:
        """A bias of `-inf` takes out a token of the shortlist, or a cluster."""
        if self.bias is None:
            return None
        real = self.bias.detach() != -torch.inf
        shortlist = len(self.weight)
        parts = [real[shortlist + place].expand(stop - start) for place, (start, stop) in enumerate(self.spans)]
        return torch.cat([real[:shortlist], *parts])

    def forward(self, hidden: Float[Tensor, "*n D"]) -> Float[Tensor, "*n V"]:
        """Log-probabilities, float32 or wider."""
        first = self._first(hidden)
        shortlist = len(self.weight)
        clusters = [
            first[..., shortlist + place, None] + self._within(hidden, place) for place in range(len(self.spans))
        ]
        return torch.cat([first[..., :shortlist], *clusters], dim=-1)

    def terms(
        self,
        hidden: Float[Tensor, "*n D"],
        targets: Int[Tensor, "*n"],
        *,
        ignore_index: int = -100,
        spread: Float[Tensor, " V"] | None = None,
        chunk: int | None = None,
    ) -> tuple[Float[Tensor, "*n"], ...]:
        """The first softmax for all tokens, each tail for its own; with `spread` from all log-probabilities."""
        if spread is not None:
            return super().terms(hidden, targets, ignore_index=ignore_index, spread=spread, chunk=chunk)
        flat, targets, shape = self.flattened(hidden, targets)
        entry, cluster = self._entries(targets, ignore_index)
        nll, _ = ops.linear_terms(flat, self._matrix(), entry, bias=self.bias, ignore_index=_IGNORED, chunk=chunk)
        for place, (start, _) in enumerate(self.spans):
            if _unknown(targets):  # how many tokens a tail has is no shape of a graph: all, most ignored
                own = torch.where(cluster == place, targets - start, _IGNORED)
                nll = nll + self._tail_terms(place, flat, own, chunk)
                continue
            rows = (cluster == place).nonzero().squeeze(1)
            if len(rows):
                own = targets.index_select(0, rows) - start
                nll = nll.index_add(0, rows, self._tail_terms(place, flat.index_select(0, rows), own, chunk))
        nll = nll.reshape(shape)
        return nll, torch.zeros_like(nll)

    def loss(
        self,
        hidden: Float[Tensor, "n D"],
        targets: Int[Tensor, " n"],
        coefficients: Float[Tensor, "n 4"],
        *,
        ignore_index: int = -100,
        spread: Float[Tensor, " V"] | None = None,
        chunk: int | None = None,
    ) -> Float[Tensor, ""]:
        """A linear loss each, gradients included: three products instead of four."""
        if spread is not None or _unknown(targets):
            return super().loss(hidden, targets, coefficients, ignore_index=ignore_index, spread=spread, chunk=chunk)
        flat, targets, _ = self.flattened(hidden, targets)
        entry, cluster = self._entries(targets, ignore_index)
        on_nll = nn.functional.pad(coefficients[:, :1], (0, 3))  # `lse` is 0, whatever its coefficients
        options = {"ignore_index": _IGNORED, "chunk": chunk}
        total = ops.linear_loss(flat, self._matrix(), entry, on_nll, bias=self.bias, **options)
        for place, (start, _) in enumerate(self.spans):
            rows = (cluster == place).nonzero().squeeze(1)
            if len(rows):
                inside = product(flat.index_select(0, rows), self.projections[place])
                own = targets.index_select(0, rows) - start
                total = total + ops.linear_loss(inside, self.tails[place], own, on_nll.index_select(0, rows), **options)
        return total

    @torch.no_grad()
    def topk(self, hidden: Float[Tensor, "*n D"], k: int) -> tuple[Float[Tensor, "*n k"], Int[Tensor, "*n k"]]:
        """The k largest log-probabilities and their tokens, exact.

        No token of a cluster is more probable than the cluster, so a tail is looked at only for hidden states whose
        k-th best token so far is no better than that.
        """
        self.check_k(k)
        flat = hidden.reshape(-1, self.in_features)
        widest = max([len(self.weight) + len(self.spans), *(stop - start for start, stop in self.spans)])
        found = [self._best(part, k) for part in flat.split(chunk_rows(widest, hidden.device))]
        shape = (*hidden.shape[:-1], k)
        return torch.cat([one[0] for one in found]).reshape(shape), torch.cat([one[1] for one in found]).reshape(shape)

    @property
    def alive_drawn(self) -> int:
        """Those of the entries of the first softmax; clusters have chunks of their own."""
        return 3 * (len(self.weight) + len(self.spans))

    def draws(self, hidden: Float[Tensor, "n D"], noise: ops.Noise) -> Int[Tensor, " n"]:
        """The entry of the first softmax, then the token of the cluster where it is one."""
        entries, shortlist = ops.draw(self._first(hidden), noise(0)), len(self.weight)
        tokens = entries.clone()
        for place, (start, stop) in enumerate(self.spans):
            rows = (entries == shortlist + place).nonzero().squeeze(1)
            for part in rows.split(chunk_rows(3 * (stop - start), hidden.device)):
                tokens[part] = start + ops.draw(self._within(hidden[part], place), noise.at(part)(1))
        return tokens

    def flops(self) -> int:
        """`D (S + C)` multiply-adds and `r_i (D + size_i)` of each tail, for all log-probabilities."""
        tails = sum(tail.shape[1] * (self.in_features + len(tail)) for tail in self.tails)
        return 2 * (self.in_features * (len(self.weight) + len(self.spans)) + tails)

    def _matrix(self) -> Float[Tensor, "entries D"]:
        return torch.cat([self.weight, self.clusters]) if self.spans else self.weight

    def _first(self, hidden: Tensor) -> Tensor:
        """Log-probabilities of the entries of the first softmax."""
        return log_softmax(product(hidden, self._matrix(), self.bias))

    def _within(self, hidden: Tensor, place: int) -> Tensor:
        """Log-probabilities inside a cluster."""
        inside = product(hidden, self.projections[place])
        return log_softmax(product(inside, self.tails[place]))

    def _tail_terms(self, place: int, hidden: Tensor, targets: Tensor, chunk: int | None) -> Tensor:
        inside = product(hidden, self.projections[place])
        return ops.linear_terms(inside, self.tails[place], targets, ignore_index=_IGNORED, chunk=chunk)[0]

    def _entries(self, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
        """The entry of the first softmax that each token goes through, and its cluster, -1 for none."""
        ops.check_targets(targets, self.out_features, ignore_index)
        cluster = torch.full_like(targets, -1)
        for start, _ in self.spans:
            cluster = cluster + (targets >= start)
        cluster = torch.where(targets == ignore_index, -1, cluster)
        entry = torch.where(cluster < 0, targets, len(self.weight) + cluster)
        return torch.where(targets == ignore_index, _IGNORED, entry), cluster

    def _best(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        first, shortlist = self._first(hidden), len(self.weight)
        values, tokens = first[:, :shortlist].topk(min(k, shortlist), dim=1)
        for place, (start, stop) in enumerate(self.spans):
            bound = first[:, shortlist + place]
            if values.shape[1] == k:
                rows = (bound >= values[:, -1]).nonzero().squeeze(1)
            else:  # not k tokens yet: all are wanted
                rows = torch.arange(len(hidden), device=hidden.device)
            joint = bound[rows, None] + self._within(hidden[rows], place)
            ids = torch.arange(start, stop, device=hidden.device).expand(len(rows), -1)
            merged, where = torch.cat([values[rows], joint], 1).topk(min(k, values.shape[1] + stop - start), dim=1)
            chosen = torch.cat([tokens[rows], ids], 1).gather(1, where)
            if values.shape[1] < k:
                values, tokens = merged, chosen
            else:
                values[rows], tokens[rows] = merged, chosen
        return values, tokens

    @classmethod
    def examples(cls, in_features: int, out_features: int) -> Sequence[Self]:
        """As chosen, and with everything; and without a cluster."""
        cutoffs = sorted({out_features // 4, out_features // 2, out_features - 1} - {0})
        return [
            cls(in_features, out_features),
            cls(in_features, out_features, cutoffs=cutoffs, div_value=2.0, bias=True),
            cls(in_features, out_features, cutoffs=()),
        ]


def _unknown(targets: Tensor) -> bool:
    """Whether targets have no values to look at."""
    return torch.compiler.is_compiling() or targets.is_meta


def _checked(cutoffs: Sequence[int] | None, classes: int) -> tuple[int, ...]:
    if cutoffs is None:
        return tuple(sorted({max(1, classes // 20), classes // 5} & set(range(1, classes))))
    found = tuple(cutoffs)
    inside = all(isinstance(cut, int) and 1 <= cut < classes for cut in found)
    if not inside or list(found) != sorted(set(found)):
        raise ValueError(f"`cutoffs` must be increasing integers in [1, {classes}), got {found}.")
    return found
