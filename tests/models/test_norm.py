"""The final norm against torch's own, values and gradients."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unembed.models import FinalNorm

OWN = {
    "rms": lambda x, norm: torch.nn.functional.rms_norm(x, x.shape[-1:], norm.weight, norm.eps),
    "layer": lambda x, norm: torch.nn.functional.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps),
}


@pytest.mark.parametrize("kind", OWN)
@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3), gain=st.booleans(), scale=st.sampled_from([1e-4, 1, 1e3])
)
def test_equals_torch(kind, shape, gain, scale):
    width = shape[-1] + 1
    weight = torch.linspace(0.5, 2, width).double() if gain else None
    bias = torch.linspace(-1, 1, width).double() if gain and kind == "layer" else None
    norm = FinalNorm(kind, weight, bias, 1e-3)
    x = scale * torch.randn(*shape[:-1], width, dtype=torch.float64)
    torch.testing.assert_close(norm(x), OWN[kind](x, norm), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", OWN)
def test_gradients(kind):
    norm = FinalNorm(kind, torch.linspace(0.5, 2, 5).double(), torch.ones(5).double(), 1e-3)
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(norm, (x,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_calculated_in_float32(dtype):
    x = (300 * torch.randn(4, 64)).to(dtype)  # squares overflow float16
    norm = FinalNorm("rms", torch.ones(64), None, 1e-6)
    assert norm(x).dtype == torch.float32
    torch.testing.assert_close(norm(x), norm(x.double()).float(), rtol=1e-5, atol=1e-6)
