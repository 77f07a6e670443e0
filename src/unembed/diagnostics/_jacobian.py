"""The Jacobian of a head at one token, and the logit gradient in the coordinates of its columns.

Shapes: D numbers in the hidden state of a token, V classes that can occur, r rank.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unembed import ops
from unembed.heads import Head

_NUMBERS = 1 << 23  # of scores, in all tangents that are taken at once


@dataclass(frozen=True)
class TokenGradient:
    """The logit gradient of one token and what passes the head.

    Args:
        energy: `||g||^2`.
        kept: Energy of its projection on the columns of the row-centred Jacobian.
        rank: Of the row-centred Jacobian.
        classes: V: those whose score is not `-inf`.
        leverage: Energy that a one-hot error at the target keeps.
        along: `g` times the directions.
    """

    energy: float
    kept: float
    rank: int
    classes: int
    leverage: float
    along: Float[Tensor, " k"]


def token_gradient_reference(head: Head, hidden: Tensor, target: int) -> tuple[Tensor, Tensor]:
    """What is meant: `g` and `g Pi` with autograd's whole Jacobian and the V x V projector, in float64."""
    head = copy.deepcopy(head).double()
    hidden = hidden.double()
    scores = head(hidden[None])[0]
    jacobian = torch.autograd.functional.jacobian(lambda h: head(h[None])[0], hidden).reshape(len(scores), -1)
    gradient = torch.softmax(scores, 0) - torch.nn.functional.one_hot(torch.tensor(target), len(scores))
    centred = jacobian - jacobian.mean(0)
    return gradient, centred @ (torch.linalg.pinv(centred, rtol=1e-9) @ gradient)


class WideHead:
    """A head with its numbers in float64 (float32 on MPS), one token at a time.

    Args:
        head: The head; its parameters are read now.
    """

    def __init__(self, head: Head) -> None:
        first = next(head.parameters())
        self.device = first.device
        self.dtype = torch.float32 if self.device.type == "mps" else torch.float64
        self._head = head
        tensors = {**dict(head.named_parameters()), **dict(head.named_buffers())}
        self._tensors = {
            name: tensor.detach().to(self.dtype) if tensor.is_floating_point() else tensor
            for name, tensor in tensors.items()
        }
        self._noise = torch.finfo(first.dtype).eps

    def scores(self, hidden: Tensor) -> Float[Tensor, " V"]:
        """Scores of one token."""
        return torch.func.functional_call(self._head, self._tensors, (hidden[None],))[0]

    def jacobian(self, hidden: Tensor) -> Float[Tensor, "D V"]:
        """Transposed: a row is the tangent of all scores along one number of the hidden state."""
        size = hidden.numel()
        rows = torch.empty(size, self._head.out_features, dtype=self.dtype, device=self.device)
        step = max(1, _NUMBERS // self._head.alive)
        for start in range(0, size, step):
            units = torch.zeros(min(step, size - start), size, dtype=self.dtype, device=self.device)
            units.diagonal(start).fill_(1)

            def tangent(unit: Tensor) -> Tensor:
                return torch.func.jvp(self.scores, (hidden,), (unit.view(hidden.shape),))[1]

            rows[start : start + len(units)] = torch.func.vmap(tangent)(units)
        return rows

    @torch.no_grad()
    def gradient(self, hidden: Tensor, target: int, directions: Float[Tensor, "V k"]) -> TokenGradient:
        """The logit gradient of a token and its projection.

        Raises:
            ValueError: If a score is NaN, or the target's is `-inf`.
        """
        hidden = hidden.to(self.device, self.dtype)
        scores = self.scores(hidden)
        real = scores != -torch.inf
        if bool(scores.isnan().any()) or not bool(real[target]):
            raise ValueError(f"the score of class {target} is -inf, or one is NaN")
        jacobian = self.jacobian(hidden)
        if not bool(real.all()):
            place = int(real[:target].sum())
            scores, jacobian, directions, target = scores[real], jacobian[:, real], directions[real], place
        exponentials = (scores - scores.max()).exp()
        own = exponentials[target].clone()
        exponentials[target] = 0
        rest = exponentials.sum()
        off, on = exponentials / (own + rest), rest / (own + rest)  # so that p_y - 1 is never formed
        svd = ops.tall_svd(jacobian.T, noise_eps=self._noise)
        turn = (svd.right[:, : svd.rank] / svd.values[: svd.rank]).to(self.device, self.dtype)
        passed = (jacobian @ off - on * jacobian[:, target]) @ turn
        row = (jacobian[:, target] - svd.mean.to(self.device, self.dtype)) @ turn
        return TokenGradient(
            energy=float(off.square().sum() + on.square()),
            kept=float(passed.square().sum()),
            rank=svd.rank,
            classes=len(scores),
            leverage=float(row.square().sum()),
            along=(off @ directions - on * directions[target]).double().cpu(),
        )
