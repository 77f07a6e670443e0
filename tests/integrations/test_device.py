"""A model on another device than the head, one without float64 (Apple's): real numbers on a device that is pretended.

The tensors say `meta` and hold their values beside them. The pretended device refuses what a real one refuses: float64,
and tensors of two devices in one operation.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from unembed.integrations import check_parity, hidden_states, open_model
from unembed.models import Unembedding

pytest.importorskip("transformers")
THERE = torch.device("meta")


class Elsewhere(torch.Tensor):
    """A tensor that says it is on `THERE`, with its values in `held`."""

    @staticmethod
    def __new__(cls, held):
        if held.dtype == torch.float64:
            raise TypeError("this device has no float64")
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, held.stride(), held.storage_offset(), dtype=held.dtype, device=THERE
        )
        made.held = held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError("only inside `Pretended`")


class Pretended(TorchDispatchMode):
    """Runs every operation on `held`; its result is where its inputs were, or where it is sent."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        here = [x for x in tensors if not isinstance(x, Elsewhere)]
        there = len(here) < len(tensors)
        moves = function.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_)
        if there and any(x.dim() for x in here) and not moves:
            raise RuntimeError(f"{function}: tensors of two devices")
        target = kwargs.get("device")
        if target is not None:
            there = torch.device(target) == THERE
            kwargs["device"] = torch.device("cpu")
        args, kwargs = tree_map_only(Elsewhere, lambda x: x.held, (args, kwargs))
        result = function(*args, **kwargs)
        return tree_map_only(torch.Tensor, Elsewhere, result) if there else result


def _send(model):
    """Every parameter and buffer of `model` to the pretended device."""
    for module in model.modules():
        for name, tensor in list(module._parameters.items()):
            if tensor is not None:
                module._parameters[name] = torch.nn.Parameter(Elsewhere(tensor.detach()), requires_grad=False)
        for name, tensor in list(module._buffers.items()):
            if tensor is not None:
                module._buffers[name] = Elsewhere(tensor)
    model.tie_weights()
    return model


def test_the_pretended_device_refuses_what_a_real_one_does():
    with Pretended():
        x = torch.ones(2).to(THERE)
        assert x.device == THERE
        assert (x + 1).cpu().tolist() == [2, 2]
        with pytest.raises(TypeError, match="no float64"):
            x.double()
        with pytest.raises(RuntimeError, match="two devices"):
            x + torch.ones(2)


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_parity_and_hidden_states_of_a_model_on_another_device(family_folder, documents, name):
    folder = family_folder(name)
    model, tokenizer = open_model(folder)
    model.set_attn_implementation("eager")
    model.config.pad_token_id = None  # transformers looks for it with a list as index, which no mode sees
    expected = torch.cat([block.hidden for block in hidden_states(model, tokenizer, documents, tokens=200)])
    head = Unembedding.load(folder)
    with Pretended():
        _send(model)
        assert check_parity(model, tokenizer, head, documents).status == "ok"
        wrong = Unembedding(head.weight, norm=head.norm, scale=1.5, softcap=head.softcap)
        check = check_parity(model, tokenizer, wrong, documents)
        assert check.status == "failed"
        assert "the scale is 1.5 and should be 1." in check.message
        found = torch.cat([block.hidden for block in hidden_states(model, tokenizer, documents, tokens=200)])
        assert found.device == THERE
        assert (found.cpu() - expected).abs().max() < 1e-5
        own = Unembedding(model.get_output_embeddings().weight, norm=head.norm.to(THERE), softcap=head.softcap)
        assert check_parity(model, tokenizer, own, documents).status == "ok"
