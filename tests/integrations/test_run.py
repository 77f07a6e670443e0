"""Hidden states of real model families: equal to a plain forward, whatever the batch, and the head never runs."""

from __future__ import annotations

import warnings

import pytest
import torch

from unembed.integrations import _run, check_parity, hidden_states, open_model
from unembed.integrations._run import find_head, head_input
from unembed.integrations._windows import plan_windows
from unembed.models import Unembedding
from unembed.results import InputError
from unembed.text import Document

pytest.importorskip("transformers")
OPTIONS = {"tokens": 700, "context": 48, "seed": 3}


def _run_all(model, tokenizer, documents, **options):
    """The rows of all blocks by window and place in it, so that runs with other batches can be compared."""
    blocks = list(hidden_states(model, tokenizer, documents, **options))
    order = torch.cat([block.windows for block in blocks]).argsort(stable=True)
    return {
        name: torch.cat([getattr(block, name) for block in blocks])[order]
        for name in ("hidden", "targets", "documents", "windows")
    }


def test_each_row_is_that_of_a_plain_forward_of_its_window_alone(family, family_folder, documents):
    # Families with learned positions and state-space models are among these: padding must not move or enter anything.
    model, tokenizer = open_model(family_folder(family))
    found = _run_all(model, tokenizer, documents, batch_tokens=500, **OPTIONS)
    windows = list(plan_windows(tokenizer, documents, **OPTIONS))
    assert len({len(window.inputs) for window in windows}) > 3, "or nothing is padded"
    with torch.no_grad():
        # The state after the final norm: no hook, no padding, no batch.
        expected = [
            model.base_model(torch.from_numpy(w.inputs)[None]).last_hidden_state[0, -len(w.targets) :] for w in windows
        ]
    expected = torch.cat(expected)
    assert found["hidden"].dtype == torch.float32
    error = (found["hidden"] - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < 1e-5
    assert found["targets"].tolist() == [target for w in windows for target in w.targets.tolist()]
    assert found["documents"].tolist() == [w.document for w in windows for _ in w.targets]
    assert found["windows"].tolist() == [w.window for w in windows for _ in w.targets]


@pytest.mark.parametrize("name", ["gpt2", "mamba", "gemma3_text"])
def test_the_batch_does_not_matter(family_folder, documents, name):
    model, tokenizer = open_model(family_folder(name))
    alone, together = (_run_all(model, tokenizer, documents, batch_tokens=n, **OPTIONS) for n in (1, 5000))
    assert (alone["hidden"] - together["hidden"]).abs().max() < 2e-5 * alone["hidden"].abs().max()
    assert torch.equal(alone["targets"], together["targets"])


def test_the_same_seed_gives_the_same_bits(family_folder, documents):
    model, tokenizer = open_model(family_folder("llama"))
    first, again = (_run_all(model, tokenizer, documents, **OPTIONS) for _ in range(2))
    other = _run_all(model, tokenizer, documents, **{**OPTIONS, "seed": 4})
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["targets"], other["targets"])


def test_the_head_is_never_computed_and_left_as_it_was(family_folder, documents, monkeypatch):
    model, tokenizer = open_model(family_folder("gpt2"))
    head = find_head(model)

    def fail(*_args):
        raise AssertionError("the head ran")

    monkeypatch.setattr(head, "forward", fail)
    assert sum(map(len, hidden_states(model, tokenizer, documents, tokens=50))) == 50
    assert not head._forward_pre_hooks
    monkeypatch.undo()
    assert model(torch.tensor([[1, 2]])).logits.shape == (1, 2, 264)


def test_a_model_in_training_is_measured_without_dropout_and_left_as_it_was(family_folder, documents):
    drop = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
    model, tokenizer = open_model(family_folder("gpt2", **drop))
    expected = _run_all(model, tokenizer, documents, **OPTIONS)
    model.train()
    model.base_model.h[1].mlp.eval()  # a part that its owner froze
    modes = [module.training for module in model.modules()]
    assert not all(modes)
    for block in hidden_states(model, tokenizer, documents, **OPTIONS):
        assert [module.training for module in model.modules()] == modes, "between the blocks too"
        assert torch.is_grad_enabled()
        assert not block.hidden.requires_grad
    found = _run_all(model, tokenizer, documents, **OPTIONS)
    assert all(torch.equal(found[name], expected[name]) for name in found)
    check = check_parity(model, tokenizer, Unembedding.load(model), documents)
    assert check.status == "ok", check.message
    assert [module.training for module in model.modules()] == modes


def test_the_mode_is_put_back_after_an_error(family_folder, monkeypatch):
    model, _ = open_model(family_folder("gpt2"))
    model.train()

    def fail(*_args, **_options):
        raise KeyError

    monkeypatch.setattr(model, "forward", fail)
    with pytest.raises(KeyError):
        head_input(model, torch.tensor([[1]]))
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda documents: (document for document in documents), "got generator, which can be read once"),
        (iter, "got list_iterator, which can be read once"),
        (lambda documents: [document.text for document in documents], r"type str; wrap .* unembed\.text\.Document"),
        (lambda documents: {"rows": documents}.items(), "got an item of type tuple"),
        (lambda documents: documents[0].text, "got one string"),
        (lambda documents: None, "got NoneType"),
    ],
)
def test_what_is_not_a_source_of_documents_is_refused(family_folder, documents, wrong, message):
    model, tokenizer = open_model(family_folder("gpt2"))
    given = wrong(documents)
    with pytest.raises(InputError, match=message):
        check_parity(model, tokenizer, Unembedding.load(model), given)
    with pytest.raises(InputError, match=message):
        list(hidden_states(model, tokenizer, given, tokens=10))
    if hasattr(given, "__next__"):
        assert next(given) is documents[0], "nothing was read from it"


def test_a_row_of_a_stream_that_is_no_document_is_refused(family_folder, documents):
    class Rows:
        def __iter__(self):
            yield from [documents[0], {"text": "a b c"}]

    model, tokenizer = open_model(family_folder("gpt2"))
    with pytest.raises(InputError, match="an item of type dict"):
        list(hidden_states(model, tokenizer, Rows(), tokens=1000))


def test_progress_counts_to_the_tokens(family_folder, documents):
    model, tokenizer = open_model(family_folder("llama"))
    seen = []
    for _ in hidden_states(
        model, tokenizer, documents, tokens=300, batch_tokens=64, progress=lambda *now: seen.append(now)
    ):
        pass
    assert seen[-1] == (300, 300)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


@pytest.mark.parametrize(("dtype", "expected"), [("bfloat16", torch.float32), ("float64", torch.float64)])
def test_hidden_states_are_float32_or_wider(family_folder, documents, dtype, expected):
    model, tokenizer = open_model(family_folder("qwen3"), dtype=dtype)
    assert next(iter(hidden_states(model, tokenizer, documents, tokens=50))).hidden.dtype == expected


def test_the_models_positions_bound_the_window(family_folder, documents):
    model, tokenizer = open_model(family_folder("llama", max_position_embeddings=20))
    blocks = hidden_states(model, tokenizer, documents, tokens=400, context=512)
    lengths = torch.bincount(torch.cat([block.windows for block in blocks]))
    assert lengths.max() == 19, "the bos token takes a position"


def test_exhausted_text_is_said_once_and_what_there_is_comes(family_folder):
    model, tokenizer = open_model(family_folder("gpt2"))
    with pytest.warns(UserWarning, match="exhausted after 4 of 100 predictions") as said:
        blocks = list(hidden_states(model, tokenizer, [Document("a", "hello")], tokens=100))
    assert len(said) == 1
    assert sum(map(len, blocks)) == 4


@pytest.mark.parametrize("texts", [[], [""], ["x", "y"]])
def test_text_without_a_prediction_is_refused(family_folder, texts):
    model, tokenizer = open_model(family_folder("gpt2"))
    with pytest.raises(InputError, match="no predictions"):
        list(hidden_states(model, tokenizer, [Document("a", text) for text in texts], tokens=10))


def test_a_tokenizer_of_another_model_is_refused(family_folder, documents):
    model, tokenizer = open_model(family_folder("gpt2", vocab_size=70))
    with pytest.raises(InputError, match=r"gives id \d+, but the model's embedding has 70 rows"):
        list(hidden_states(model, tokenizer, documents, tokens=10))


@pytest.mark.parametrize("option", ["tokens", "context", "batch_tokens"])
def test_sizes_must_be_positive(family_folder, documents, option):
    model, tokenizer = open_model(family_folder("gpt2"))
    with pytest.raises(InputError, match="must be at least 1"):
        list(hidden_states(model, tokenizer, documents, **{"tokens": 5, option: 0}))


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("BertConfig", {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}),
        ("XLNetConfig", {"d_model": 8, "n_layer": 1, "n_head": 2, "d_inner": 8}),
    ],
)
def test_a_model_that_looks_ahead_is_refused(kind, sizes, byte_tokenizer, documents):
    import transformers

    config = getattr(transformers, kind)(vocab_size=264, **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(InputError, match="looks at later tokens"):
        list(hidden_states(model, byte_tokenizer(), documents, tokens=10))


def test_a_body_without_a_head_is_refused(family_folder, documents):
    model, tokenizer = open_model(family_folder("llama"))
    with pytest.raises(InputError, match="LlamaModel has no output layer"):
        list(hidden_states(model.base_model, tokenizer, documents, tokens=10))


def test_a_forward_that_goes_round_the_head_is_refused(family_folder, documents):
    model, tokenizer = open_model(family_folder("llama"))
    model.forward = lambda input_ids, use_cache: model.base_model(input_ids)
    with pytest.raises(InputError, match="not called"):
        list(hidden_states(model, tokenizer, documents, tokens=10))


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA"), MemoryError(), RuntimeError("[enforce fail] can't allocate memory: you tried")],
)
def test_out_of_memory_is_one_line(family_folder, monkeypatch, error):
    model, _ = open_model(family_folder("llama"))

    def fail(*_args, **_options):
        raise error

    monkeypatch.setattr(model, "forward", fail)
    with pytest.raises(InputError, match="Out of memory while running the model; use fewer"):
        head_input(model, torch.tensor([[1]]))
    assert not find_head(model)._forward_pre_hooks


def test_nothing_is_written_and_settings_are_put_back(family_folder, documents, capfd):
    import logging

    from transformers.utils import logging as hf_logging

    folder = family_folder("gemma2")  # which may have to be written first
    capfd.readouterr()
    logging.getLogger("transformers").setLevel(logging.INFO)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model, tokenizer = open_model(folder)
        list(hidden_states(model, tokenizer, documents, tokens=300))
    assert not said
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("transformers").level == logging.INFO
    assert hf_logging.is_progress_bar_enabled()
    logging.getLogger("transformers").setLevel(logging.NOTSET)


def test_batches_hold_what_they_may():
    class Plan:
        def __init__(self, length, window):
            self.inputs, self.window = range(length), window

    windows = [Plan(3 + i * 7 % 19, i) for i in range(200)]
    batches = list(_run._batches(iter(windows), 64))
    assert sorted(w.window for batch in batches for w in batch) == list(range(200))
    padded = [len(batch) * max(len(w.inputs) for w in batch) for batch in batches]
    assert max(padded) <= 64
    assert sum(padded) <= 1.15 * sum(len(w.inputs) for w in windows), "windows of like length go together"
    assert [len(batch) for batch in _run._batches(iter([Plan(100, 0), Plan(100, 1)]), 64)] == [1, 1]
