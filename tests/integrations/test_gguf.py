"""The fast GGUF reader holds what the stock one holds, and a model opened through it is the model that was written."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from unembed.integrations import _gguf, check_parity, hidden_states, open_model
from unembed.integrations._gguf import read_once
from unembed.models import Unembedding
from unembed.results import InputError

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")


def _write(path, config, state, tokenizer):
    """A Qwen2 checkpoint as GGUF: the family whose tensors need no rearranging."""
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    vocab = tokenizer.get_vocab()
    tokens = sorted(vocab, key=vocab.get) + [f"[PAD{i}]" for i in range(len(vocab), config.vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(vocab) - 3) + [5] * (config.vocab_size - len(vocab)))
    writer.add_token_scores([i / 7 for i in range(config.vocab_size)])
    writer.add_token_merges([])
    writer.add_bos_token_id(0)
    writer.add_array("test.flags", [True, False])
    writer.add_array("test.empty", [""])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    for name, tensor in state.items():
        if name != "lm_head.weight":
            writer.add_tensor(names.get_name(name, (".weight", ".bias")), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory, byte_tokenizer):
    """A tiny Qwen2 and the GGUF file made of it."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Qwen2Config(
        vocab_size=264, num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=True, **sizes
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.3)
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    _write(path, config, model.state_dict(), byte_tokenizer())
    return model, path


def test_the_fast_reader_holds_what_the_stock_one_holds(written):
    stock = gguf.GGUFReader(written[1])
    with read_once():
        fast = gguf.GGUFReader(written[1])
        assert gguf.GGUFReader(str(written[1])) is fast
    assert list(stock.fields) == list(fast.fields)
    for name, field in stock.fields.items():
        other = fast.fields[name]
        assert (field.offset, field.name, field.data, field.types) == (
            other.offset,
            other.name,
            other.data,
            other.types,
        )
        assert len(field.parts) == len(other.parts)
        for part, same in zip(field.parts, other.parts, strict=True):
            assert part.dtype == same.dtype, name
            assert np.array_equal(part, same), name
        assert field.contents() == other.contents()
    for tensor, same in zip(stock.tensors, fast.tensors, strict=True):
        assert tensor.name == same.name
        assert np.array_equal(tensor.data, same.data)


def test_gguf_is_as_before_afterwards_even_after_an_error(written, tmp_path):
    before = gguf.GGUFReader
    with pytest.raises(FileNotFoundError), read_once():
        gguf.GGUFReader(tmp_path / "nowhere")
    assert gguf.GGUFReader is before


def test_writing_modes_get_the_stock_reader(written):
    with read_once():
        assert type(gguf.GGUFReader(written[1], "c")).__name__ == "GGUFReader"
        assert type(gguf.GGUFReader(written[1])).__name__ == "FastReader"


def test_another_version_of_gguf_reads_with_the_stock_reader(written, monkeypatch):
    monkeypatch.setattr(_gguf, "version", lambda _name: "0.20.0")
    with read_once():
        first = gguf.GGUFReader(written[1])
        assert type(first) is gguf.gguf_reader.GGUFReader
        assert gguf.GGUFReader(written[1]) is first
    assert type(open_model(written[1])[0]).__name__ == "Qwen2ForCausalLM"


def test_a_reader_without_what_the_fast_one_uses_is_left_alone(written, monkeypatch):
    class Other:
        def __init__(self, path, mode="r"):
            self.path = path

    monkeypatch.setattr(gguf, "GGUFReader", Other)
    with read_once():
        assert type(gguf.GGUFReader(written[1])) is Other
    assert gguf.GGUFReader is Other


def test_another_thread_gets_the_stock_reader_and_blocks_do_not_overlap(written):
    stock = gguf.GGUFReader
    with ThreadPoolExecutor(1) as pool:
        with read_once():
            with read_once():
                assert type(gguf.GGUFReader(written[1])).__name__ == "FastReader"
            assert type(gguf.GGUFReader(written[1])).__name__ == "FastReader"
            assert pool.submit(lambda: type(gguf.GGUFReader(written[1]))).result(60) is stock
            other = pool.submit(_name_inside, written[1])
            with pytest.raises(TimeoutError):
                other.result(0.2)
        assert other.result(60) == "FastReader"
    assert gguf.GGUFReader is stock


def _name_inside(path):
    with read_once():
        return type(gguf.GGUFReader(path)).__name__


def test_a_file_that_changes_is_read_again(written, tmp_path):
    import os
    import shutil

    path = tmp_path / "a.gguf"
    shutil.copy(written[1], path)
    with read_once():
        first = gguf.GGUFReader(path)
        os.utime(path, (1, 1))
        assert gguf.GGUFReader(path) is not first


def test_a_model_from_a_gguf_file_is_the_one_written(written, documents, capfd):
    original, path = written
    model, tokenizer = open_model(path)
    assert capfd.readouterr() == ("", "")
    ids = torch.tensor([[5, 70, 200, 3]])
    with torch.no_grad():
        assert (model(ids).logits - original(ids).logits).abs().max() < 1e-4
    expected = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    assert type(tokenizer) is type(expected)
    assert tokenizer("a b")["input_ids"] == expected("a b")["input_ids"] == [67, 223, 68]
    check = check_parity(model, tokenizer, Unembedding.load(path), documents)
    assert check.status == "ok", check.message
    assert sum(map(len, hidden_states(model, tokenizer, documents, tokens=200))) == 200


def test_a_folder_that_holds_one_gguf_file_is_that_file(written):
    assert type(open_model(written[1].parent)[0]).__name__ == "Qwen2ForCausalLM"


def test_without_gguf_the_extra_is_named(written, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(InputError, match=r'needs gguf: pip install "unembed\[hf\]"'):
        open_model(written[1])
