"""Heads of model objects: referenced, confirmed, refused."""

import pytest
import torch
from torch import nn

from unembed.models import Llama, LlamaConfig, Unembedding
from unembed.results import InputError

ROWS, WIDTH = 12, 6


class Norm(nn.Module):
    """An RMS norm under a name nobody knows."""

    def __init__(self, change=lambda y: y):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.eps = 1e-2
        self.change = change

    def forward(self, x):
        return self.change(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight)


class Body(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.embed_tokens = nn.Embedding(ROWS, WIDTH)
        self.norm = norm


class Model(nn.Module):
    def __init__(self, *, norm=None, head=None):
        super().__init__()
        torch.manual_seed(0)
        self.config = {"model_type": "novel", "hidden_size": WIDTH, "vocab_size": ROWS}
        self.model = Body(norm or Norm())
        self.lm_head = head or nn.Linear(WIDTH, ROWS, bias=True)


def checked(head, code):
    (check,) = (c for c in head.integrity if c.code == code)
    return check


def test_weights_are_referenced_and_the_formula_confirmed():
    model = Model()
    head = Unembedding.load(model)
    assert head.weight.data_ptr() == model.lm_head.weight.data_ptr()
    assert (head.kind, head.source, head.tied, head.norm.kind, head.norm.eps) == ("object", "Model", False, "rms", 1e-2)
    x = torch.randn(3, WIDTH)
    torch.testing.assert_close(head.scores(head.norm(x)), model.lm_head(model.model.norm(x)))
    assert not head.scores(x).requires_grad


@pytest.mark.parametrize(
    "change", [lambda y: y + 1e-2, lambda y: y.clamp(-1, 1), lambda y: y[..., :2], lambda y: 1 / 0]
)
def test_a_norm_that_computes_something_else_is_left_out(change):  # M9: tuned-lens#56
    model = Model(norm=Norm(change))
    head = Unembedding.load(model)
    assert head.norm is None
    assert checked(head, "UNE009").status == "warning"
    assert "a Norm, is neither" in checked(head, "UNE009").message
    with pytest.raises(InputError, match="norm=rms"):
        Unembedding.load(model, norm="rms")
    assert Unembedding.load(model, norm="none").norm is None


@pytest.mark.parametrize(("true", "stated"), [(1e-2, 1.1e-2), (1e-2, 1e-6), (1e-6, 1e-5)])
def test_a_wrong_eps_is_seen(true, stated):
    norm = Norm()
    norm.forward = lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + true) * norm.weight
    norm.eps = stated
    assert Unembedding.load(Model(norm=norm)).norm is None
    norm.eps = true
    assert Unembedding.load(Model(norm=norm)).norm.eps == true


def test_our_own_llama_is_tied():
    sizes = {"vocab_size": ROWS, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model = Llama(LlamaConfig(**sizes, num_attention_heads=1))
    with torch.no_grad():
        model.model.norm.weight.add_(torch.rand(8))
    head = Unembedding.load(model)
    hidden = torch.randn(2, 8)
    torch.testing.assert_close(head.scores(hidden), model.scores(hidden))
    torch.testing.assert_close(head.norm(hidden), model.model.norm(hidden))
    assert (head.tied, head.architecture) == (True, "llama")


class Adapted(nn.Linear):
    """A head with an adapter on it."""

    def forward(self, x):
        return super().forward(x) + 0.1


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: nn.Linear(2, 2), "has no `config`"),
        (lambda: Model(head=Adapted(WIDTH, ROWS)), "lm_head, a Adapted, does not give"),
        (lambda: Model().to("meta"), "meta device"),
    ],
)
def test_models_without_a_linear_head_are_refused(model, said):
    with pytest.raises(InputError, match=said):
        Unembedding.load(model())


def test_a_subclass_that_is_linear_is_accepted():
    class Same(nn.Linear):
        pass

    assert Unembedding.load(Model(head=Same(WIDTH, ROWS))).vocab_rows == ROWS


@pytest.mark.filterwarnings("ignore")
def test_transformers_bodies_and_encoders_are_refused():
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": ROWS,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    with pytest.raises(InputError, match="LlamaModel is a body without a head"):
        Unembedding.load(transformers.LlamaModel(transformers.LlamaConfig(**sizes)))
    with pytest.raises(InputError, match="predicts masked tokens"):
        Unembedding.load(transformers.BertForMaskedLM(transformers.BertConfig(**sizes)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_norm_is_confirmed(dtype):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": ROWS, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=1)).to(dtype)
    with torch.no_grad():
        model.model.norm.weight.copy_(torch.rand(64) + 0.5)
    head = Unembedding.load(model)
    assert head.norm.kind == "rms"
    assert head.weight.dtype == dtype
