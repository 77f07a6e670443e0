r"""Feature maps of linear attention: $\phi$ with $\phi(q)\cdot\phi(k)$ in the place of $e^{s\,q\cdot k}$.

Shapes: E width of queries and keys, M features.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from unembed.ops._scores import widened


class FeatureMap(ABC):
    """A feature map. Features are computed in float32 or wider, whatever the input dtype."""

    name: ClassVar[str]
    exponential: ClassVar[bool] = False
    """Whether calling the map gives the logarithm of the features, so that a shift can be taken off first."""
    scaled: ClassVar[bool] = True
    """Whether the map depends on `s * q . k`; elementwise maps do not, and take no scale."""

    @abstractmethod
    def size(self, width: int) -> int:
        """M for inputs of width E."""

    @abstractmethod
    def __call__(self, x: Float[Tensor, "*B E"], scale: float = 1.0) -> Float[Tensor, "*B M"]:
        r"""Features of $\sqrt{s}\, x$, or their logarithm where the map is `exponential`."""

    def check(self, width: int, scale: float | None) -> float:
        """The scale that counts: `1 / sqrt(E)` when None.

        Raises:
            ValueError: If the map takes no scale, or it is not positive and finite.
        """
        if not self.scaled:
            if scale is not None:
                raise ValueError(f"`scale` must be None for the elementwise map `{self.name}`, got {scale}.")
            return 1.0
        scale = 1 / math.sqrt(max(1, width)) if scale is None else scale
        if not 0 < scale < math.inf:
            raise ValueError(f"`scale` must be positive and finite, got {scale}.")
        return scale


@dataclass(frozen=True)
class Elu(FeatureMap):
    r"""$\mathrm{elu}(x) + 1$ of each element (Katharopoulos et al., 2020, arXiv:2006.16236)."""

    name = "elu"
    scaled = False

    def size(self, width: int) -> int:
        """E."""
        return width

    def __call__(self, x: Float[Tensor, "*B E"], scale: float = 1.0) -> Float[Tensor, "*B E"]:
        """Not `expm1(x) + 1`, which half precision, and float32 below -17, would round to 0.

        A sum of two parts, since a `where` on random signs takes a processor 6 times as long.
        """
        x = x.to(widened(x.dtype))
        return x.clamp(max=0).exp() + x.relu()


@dataclass(frozen=True)
class Relu(FeatureMap):
    """The positive part of each element."""

    name = "relu"
    scaled = False

    def size(self, width: int) -> int:
        """E."""
        return width

    def __call__(self, x: Float[Tensor, "*B E"], scale: float = 1.0) -> Float[Tensor, "*B E"]:
        """A query without a positive feature, or whose features no key has, sees nothing."""
        return torch.relu(x.to(widened(x.dtype)))


@dataclass(frozen=True)
class Exp(FeatureMap):
    r"""$e^x$ of each element: $\phi(q)\cdot\phi(k) = \sum_i e^{q_i + k_i}$."""

    name = "exp"
    exponential = True
    scaled = False

    def size(self, width: int) -> int:
        """E."""
        return width

    def __call__(self, x: Float[Tensor, "*B E"], scale: float = 1.0) -> Float[Tensor, "*B E"]:
        """Their logarithm: x."""
        return x.to(widened(x.dtype))


@dataclass(frozen=True)
class Polynomial(FeatureMap):
    r"""$(s\, q\cdot k + c)^p$ exactly, by the monomials of degree p with multinomial weights.

    Args:
        degree: p, even: an odd power can be negative, and weights must not be.
        constant: c, at least 0.

    Raises:
        ValueError: If either is not so.
    """

    degree: int = 2
    constant: float = 1.0
    name = "polynomial"

    def __post_init__(self) -> None:
        """Refuse what has no such map."""
        if self.degree < 2 or self.degree % 2:
            raise ValueError(f"`degree` must be even and at least 2: odd powers are negative, got {self.degree}.")
        if not 0 <= self.constant < math.inf:
            raise ValueError(f"`constant` must be at least 0 and finite, got {self.constant}.")

    def size(self, width: int) -> int:
        """`C(E + p, p)`, or `C(E + p - 1, p)` where c = 0."""
        return math.comb(width + self.degree - (self.constant == 0), self.degree)

    def __call__(self, x: Float[Tensor, "*B E"], scale: float = 1.0) -> Float[Tensor, "*B M"]:
        r"""$\sqrt{p! / \alpha!}\, \prod_i u_i^{\alpha_i}$ for all $|\alpha| = p$; $u = (\sqrt{s}\, x, \sqrt{c})$."""
        u = x.to(widened(x.dtype)) * math.sqrt(scale)
        if self.constant:
            u = torch.cat([u, torch.full_like(u[..., :1], math.sqrt(self.constant))], -1)
        return _monomials(u, self.degree)


@dataclass(frozen=True)
class Taylor(FeatureMap):
    r"""$1 + t + t^2/2$ with $t = s\, q\cdot k$ exactly: the exponential to second order, never below 1/2."""

    name = "taylor"

    def size(self, width: int) -> int:
        """`1 + E + E (E + 1) / 2`."""
        return math.comb(width + 2, 2)

    def __call__(self, x: Float[Tensor, "*B E"], scale: float = 1.0) -> Float[Tensor, "*B M"]:
        """1, the elements, and their products over the square root of 2."""
        u = x.to(widened(x.dtype)) * math.sqrt(scale)
        return torch.cat([torch.ones_like(u[..., :1]), u, _monomials(u, 2) / math.sqrt(2)], -1)


@dataclass(frozen=True)
class Favor(FeatureMap):
    r"""Positive random features of softmax, FAVOR+ (Choromanski et al., 2021, arXiv:2009.14794).

    $E[\phi(q)\cdot\phi(k)] = e^{s\, q\cdot k}$ for
    $\phi(x)_i = e^{w_i \cdot u - |u|^2 / 2} / \sqrt{M}$ with $u = \sqrt{s}\, x$ and $w_i \sim N(0, I)$.

    Args:
        width: E.
        features: M.
        seed: Of the rows w; equal seeds, equal rows.
        orthogonal: Blocks of E rows at right angles to each other, with the norms of independent ones: less variance.

    Raises:
        ValueError: If `width` or `features` is not positive.
    """

    width: int
    features: int
    seed: int
    orthogonal: bool = True
    rows: Float[Tensor, "M E"] = field(init=False, repr=False, compare=False)
    name = "favor"
    exponential = True

    def __post_init__(self) -> None:
        """Draw the rows."""
        if self.width < 1 or self.features < 1:
            raise ValueError(f"`width` and `features` must be at least 1, got {self.width} and {self.features}.")
        object.__setattr__(self, "rows", _gaussian_rows(self.features, self.width, self.seed, self.orthogonal))

    def size(self, width: int) -> int:
        """M."""
        return self.features

    def check(self, width: int, scale: float | None) -> float:
        """As every map, and that the inputs have the width of the rows."""
        if width != self.width:
            raise ValueError(f"`feature_map` was made for width {self.width}, but queries and keys have {width}.")
        return super().check(width, scale)

    def __call__(self, x: Float[Tensor, "*B E"], scale: float = 1.0) -> Float[Tensor, "*B M"]:
        """Their logarithm."""
        u = x.to(widened(x.dtype)) * math.sqrt(scale)
        rows = self.rows.to(u.device, u.dtype)
        return u @ rows.T - u.square().sum(-1, keepdim=True) / 2 - math.log(self.features) / 2


_MAPS: dict[str, type[FeatureMap]] = {kind.name: kind for kind in (Elu, Relu, Exp, Polynomial, Taylor)}


def build_map(name: str | FeatureMap) -> FeatureMap:
    """The map of that name with its usual options; an instance is itself.

    Raises:
        ValueError: If there is no such map, or its options must be chosen (`favor`).
    """
    if isinstance(name, FeatureMap):
        return name
    if name == Favor.name:
        raise ValueError('"favor" needs width, features and seed: pass `Favor(width, features, seed)`.')
    if name not in _MAPS:
        raise ValueError(f"`feature_map` must be one of {', '.join(_MAPS)} or a FeatureMap, got {name!r}.")
    return _MAPS[name]()


def _monomials(u: Tensor, degree: int) -> Tensor:
    """All of that degree, each times the root of its multinomial coefficient: their dot product is `(u . v)^degree`."""
    width, device = u.shape[-1], u.device
    if degree == 2:  # thousands of them at usual widths: not by a Python loop
        indices = torch.triu_indices(width, width, device=device)
        weights = torch.where(indices[0] == indices[1], 1.0, torch.tensor(2.0, dtype=u.dtype, device=device).sqrt())
    else:
        places = list(itertools.combinations_with_replacement(range(width), degree))
        repeats = [math.prod(math.factorial(place.count(i)) for i in set(place)) for place in places]
        indices = torch.tensor(places, dtype=torch.int64, device=device).reshape(-1, degree).T
        weights = torch.tensor(repeats, dtype=u.dtype, device=device).reciprocal().mul(math.factorial(degree)).sqrt()
    product = weights.to(u.dtype)
    for index in indices:
        product = product * u.index_select(-1, index)
    return product


def _gaussian_rows(count: int, width: int, seed: int, orthogonal: bool) -> Tensor:
    """Standard normal rows in float64, at right angles within blocks of `width`, each direction uniform."""
    generator = torch.Generator().manual_seed(seed)
    free = torch.randn(count, width, generator=generator, dtype=torch.float64)
    if not orthogonal:
        return free
    norms, blocks = torch.linalg.vector_norm(free, dim=1, keepdim=True), []
    for _ in range(0, count, width):
        gaussian = torch.randn(width, width, generator=generator, dtype=torch.float64)
        q, r = torch.linalg.qr(gaussian)
        blocks.append((q * r.diagonal().sign()).T)  # without the signs it would not be uniform (Haar)
    return torch.cat(blocks)[:count] * norms
