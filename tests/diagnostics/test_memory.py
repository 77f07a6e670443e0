"""Memory of a measurement does not grow with tokens, and a CUDA device measures what the CPU does."""

import subprocess
import sys

import pytest
import torch

from unembed.diagnostics import Coefficients, Gradient, LinearHead, LogprobRank, Saturation, Spectrum

# Chunks hold 2^25 scores, so V = 32768 makes two of N = 2000 and sixteen of N = 16000.
PEAK = """
import resource, sys, torch
from unembed.diagnostics import Gradient, LinearHead
torch.set_num_threads(1)
tokens, v, d = int(sys.argv[1]), 32768, 8
head = LinearHead(torch.randn(v, d))
gradient = Gradient(head)
gradient.update(torch.randn(tokens, d), torch.arange(tokens), documents=torch.arange(tokens) // 100)
assert gradient.result().values["tokens"] == tokens
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def _peak(tokens):
    run = subprocess.run([sys.executable, "-c", PEAK, str(tokens)], capture_output=True, text=True, check=True)
    return int(run.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ru_maxrss is in KiB on Linux")
def test_the_peak_of_a_gradient_measurement_is_the_same_at_eight_times_the_tokens():
    few, many = _peak(2000), _peak(16_000)
    assert many - few < 40 * 1024  # KiB; all scores at once would be 1.8 GiB more


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("condition", [10.0, 1e6])  # Gram matrix and QR
def test_a_cuda_device_measures_what_the_cpu_does(softcap, condition):
    generator = torch.Generator().manual_seed(0)
    v, d, n = 5003, 16, 50
    weight = torch.randn(v, d, generator=generator) * torch.logspace(0, -torch.tensor(condition).log10().item(), d)
    bias, hidden = torch.randn(v, generator=generator), torch.randn(n, d, generator=generator)
    options = {"softcap": softcap, "extra_rows": torch.zeros(3, d), "extra_bias": torch.zeros(3)}
    there = {k: t.cuda() if isinstance(t, torch.Tensor) else t for k, t in options.items()}
    heads = [LinearHead(weight, bias, **options), LinearHead(weight.cuda(), bias.cuda(), **there)]
    for kind in (Spectrum, Gradient, Coefficients, LogprobRank, Saturation):
        results = []
        for head in heads:
            accumulator = kind(head)
            accumulator.update(hidden, torch.arange(n), documents=torch.arange(n) // 5)
            results.append(accumulator.result())
        for one, other in zip(*(result.tables for result in results), strict=True):
            for name, column in one.columns.items():
                if column.dtype.kind == "f":
                    assert other.columns[name] == pytest.approx(column, rel=1e-3, abs=1e-4 * abs(column).max()), name
