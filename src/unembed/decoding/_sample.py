"""One draw a row through temperature, top-k, top-p and min-p at once, without a sort of the vocabulary.

Rows with a small k are drawn from the list of their k largest scores, the others by sums of blocks of all of them.

Shapes: * any, B rows, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unembed.decoding import _compiled
from unembed.decoding._draw_all import draw_all
from unembed.decoding._draw_listed import draw_listed
from unembed.decoding._largest import largest
from unembed.decoding._settings import Settings, require_finite
from unembed.decoding.filters._parameters import Number
from unembed.ops import Noise, Numbers, widened


def sample(
    scores: Float[Tensor, "*b V"],
    *,
    temperature: Number = 1.0,
    top_k: int | Tensor | None = None,
    top_p: Number | None = None,
    min_p: Number | None = None,
    joint: bool = False,
    seeds: Numbers | None = None,
    positions: Numbers | None = None,
    generator: torch.Generator | None = None,
) -> Int[Tensor, "*b"]:
    """Draw one class a row, exactly from `Temperature | TopK | TopP | MinP`, each on what the one before left.

    Parameters are numbers, or tensors with one number a row. A class of probability 0 is never drawn.

    Args:
        scores: Scores; `-inf` is excluded.
        temperature: T, from 0 (the first of the largest scores) to infinity.
        top_k: Scores to keep, equal ones by the lowest index; all when None, and in rows where it is V or more.
        top_p: Mass to keep, of what `top_k` left; all when None.
        min_p: Probability to keep, relative to the best one; all when None.
        joint: Whether the mass of `top_p` is that of the whole distribution, whatever `top_k`.
        seeds: One whole number a row: a draw is then a function of the row's seed, position and scores alone, and the
            same in any batch.
        positions: With `seeds`, one whole number a row that counts its draws, as the place of the token; 0 when None.
        generator: Instead of `seeds`; reproducible for one batch.

    Raises:
        ValueError: If a parameter is out of range or does not fit, both `seeds` and `generator` are given, or a row has
            no finite score, or one of NaN or +inf.
    """
    if not isinstance(scores, Tensor) or not scores.is_floating_point() or scores.ndim < 1 or scores.shape[-1] < 1:
        came = f"{scores.dtype} {tuple(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
        raise ValueError(f"`scores` must be floating point, a tensor [*, V] with V >= 1, got {came}.")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ValueError(f"`generator` must be a torch.Generator, got {generator!r:.80}.")
    settings = Settings.of(scores, temperature, top_k, top_p, min_p, joint)
    noise = Noise.of(math.prod(scores.shape[:-1]), scores.device, seeds=seeds, positions=positions, generator=generator)
    wide = widened(scores.dtype)
    warm = _warm(scores if scores.dtype == wide else scores.to(wide), settings)
    if _compiled.can_draw(warm) and (found := _compiled.draw(warm, settings, noise)) is not None:
        return found
    rows = warm.detach().reshape(noise.rows, scores.shape[-1])
    return _drawn(rows, settings, noise).reshape(scores.shape[:-1])


def _warm(scores: Float[Tensor, "*b V"], settings: Settings) -> Float[Tensor, "*b V"]:
    """Scores that are equal where the temperature is infinite."""
    heat = settings.temperature
    if not isinstance(heat, Tensor):
        return scores if heat < math.inf else torch.where(scores.isfinite(), 0.0, scores)
    hot = (heat == math.inf).reshape(*scores.shape[:-1], 1)
    return torch.where(hot & scores.isfinite(), 0.0, scores) if bool(hot.any()) else scores


def _drawn(rows: Float[Tensor, "B V"], settings: Settings, noise: Noise) -> Int[Tensor, " B"]:
    """A class a row, without what is compiled."""
    everything, heat = torch.arange(len(rows), device=rows.device), settings.temperature
    if not len(rows):
        return everything
    if not isinstance(heat, Tensor) and heat == 0:
        found = largest(rows, 1)
        require_finite(found.values, everything)
        return found.indices.squeeze(-1)
    if not isinstance(settings.top_k, Tensor):
        return (draw_all if settings.top_k is None else draw_listed)(rows, settings, everything, noise)
    small = settings.top_k.squeeze(-1) < rows.shape[-1]
    drawn = torch.empty_like(everything)
    for draw, part in ((draw_listed, everything[small]), (draw_all, everything[~small])):
        if len(part):
            drawn[part] = draw(rows[part], settings.at(part), part, noise)
    return drawn
