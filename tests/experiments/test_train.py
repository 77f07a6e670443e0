"""The train loop: stops and resumes without a trace, sees every window, and follows its schedule."""

import math
import signal
from dataclasses import replace

import pytest
import torch

from unembed.experiments import TrainConfig, train
from unembed.experiments._train import batch, learning_rate
from unembed.models._llama import Llama, LlamaConfig
from unembed.results import InputError

CONFIG = TrainConfig(
    model=LlamaConfig(
        vocab_size=13,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=8,
    ),
    steps=12,
    batch_size=3,
    learning_rate=1e-2,
    warmup_steps=3,
    checkpoint_every=5,
)
# 90 tokens are 10 windows at every shift, so three steps an epoch and four epochs.
TOKENS = torch.randint(13, (90,), generator=torch.Generator().manual_seed(7), dtype=torch.int32)


@pytest.fixture(autouse=True)
def _one_thread():
    """Tensors this small only wait for a second thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _interrupt(step: int, loss: float) -> None:
    if step == 7:
        signal.raise_signal(signal.SIGINT)


def _break(step: int, loss: float) -> None:
    if step == 9:
        raise RuntimeError("power cut")


@pytest.mark.parametrize(
    ("stop", "error", "kept"), [(_interrupt, KeyboardInterrupt, 7), (_break, RuntimeError, 5)], ids=["ctrl-c", "crash"]
)
def test_a_stopped_run_resumes_bit_for_bit(stop, error, kept, tmp_path):
    whole = train(CONFIG, TOKENS)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(error):
        train(CONFIG, TOKENS, folder=tmp_path, progress=stop)
    assert signal.getsignal(signal.SIGINT) is handler
    # What a crash between the tensors and the state leaves; it must not be taken for a checkpoint.
    (tmp_path / "step-0000010.safetensors").write_bytes(b"half")

    steps = []
    resumed = train(CONFIG, TOKENS, folder=tmp_path, progress=lambda step, loss: steps.append(step))
    assert steps == list(range(kept + 1, 13))
    assert resumed.losses == whole.losses
    for (name, weight), other in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(weight, other), name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state.json", "step-0000012.safetensors"]


def test_the_moments_matter_to_the_bits():
    """The guard of the test above: losses do differ when a run starts over from the same weights."""
    whole = train(CONFIG, TOKENS)
    assert len(set(whole.losses)) == CONFIG.steps
    assert train(replace(CONFIG, seed=1), TOKENS).losses[0] != whole.losses[0]
    assert train(replace(CONFIG, betas=(0.8, 0.95)), TOKENS).losses[:2] == whole.losses[:2]
    assert train(replace(CONFIG, betas=(0.8, 0.95)), TOKENS).losses[2] != whole.losses[2]


def test_a_second_ctrl_c_does_not_wait(tmp_path):
    def twice(step: int, loss: float) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(CONFIG, TOKENS, folder=tmp_path, progress=twice)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("config", "tokens", "part"),
    [(replace(CONFIG, learning_rate=2e-2), TOKENS, "config"), (CONFIG, TOKENS.roll(1), "tokens")],
)
def test_a_checkpoint_of_another_run_is_refused(config, tokens, part, tmp_path):
    train(CONFIG, TOKENS, folder=tmp_path)
    with pytest.raises(InputError, match=f"other {part}; remove it"):
        train(config, tokens, folder=tmp_path)


def test_an_epoch_visits_every_window_once_and_the_next_in_another_order():
    tokens = torch.arange(90)
    epochs = [torch.cat([batch(CONFIG, tokens, step=3 * epoch + index) for index in range(3)]) for epoch in range(4)]
    for windows in epochs:
        starts = windows[:, 0]
        assert torch.equal(windows, starts[:, None] + torch.arange(9))
        assert len(set(starts.tolist())) == 9
        assert len(set((starts % 8).tolist())) == 1
    assert len({tuple(windows[:, 0].tolist()) for windows in epochs}) == 4
    other = batch(replace(CONFIG, seed=1), tokens, step=0)
    assert not torch.equal(other, batch(CONFIG, tokens, step=0))


def test_the_last_windows_stay_inside_the_text_for_every_shift():
    for seed in range(60):
        windows = batch(replace(CONFIG, seed=seed, batch_size=10), torch.arange(88), step=0)
        assert 80 <= int(windows.max()) <= 87
        assert int(windows.min()) <= 7


def test_too_few_tokens_are_refused():
    with pytest.raises(ValueError, match="got 31 tokens"):
        train(CONFIG, TOKENS[:31])
    assert len(train(replace(CONFIG, steps=1), TOKENS[:32]).losses) == 1


def test_the_rate_climbs_straight_and_falls_by_half_a_cosine():
    config = replace(CONFIG, steps=13, warmup_steps=3, learning_rate=0.6)
    rates = [learning_rate(config, step=step) for step in range(13)]
    assert rates[:4] == pytest.approx([0.2, 0.4, 0.6, 0.6])
    assert rates[8] == pytest.approx(0.3)
    assert rates[12] == pytest.approx(0.3 * (1 + math.cos(0.9 * math.pi)))


def test_with_the_gradient_clipped_away_only_the_decay_of_matrices_is_left():
    config = replace(CONFIG, clip_norm=0.0, weight_decay=0.5)
    start = Llama(config.model, generator=torch.Generator().manual_seed(config.seed))
    trained = train(config, TOKENS).model
    decay = math.prod(1 - 0.5 * learning_rate(config, step=step) for step in range(config.steps))
    assert decay < 0.99
    for (name, before), after in zip(start.named_parameters(), trained.parameters(), strict=True):
        expected = before * decay if before.dim() == 2 else before
        torch.testing.assert_close(after, expected, rtol=1e-5, atol=0.0, msg=name)


def test_it_learns_a_cycle():
    cycle = torch.tensor([3, 1, 4, 7, 5, 9, 2, 6], dtype=torch.int32).repeat(20)
    losses = train(replace(CONFIG, steps=150), cycle).losses
    assert losses[0] == pytest.approx(math.log(13), abs=0.2)
    assert losses[-1] < 0.1
