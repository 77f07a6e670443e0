"""The hash and the checks that read values."""

import hashlib
import re
from pathlib import Path

import pytest
import torch

from unembed.models import FinalNorm, Unembedding, _checks
from unembed.results import Check, IntegrityError


def _hash(weight, bias=None, norm=None):
    return _checks.content_hash(_checks.Scan.of(weight), weight, bias, norm)


def test_the_hash_sees_every_value_and_no_dtype(draw):
    weight, bias = draw(11, 5).bfloat16(), draw(11)
    norm = FinalNorm("rms", draw(5), None, 1e-6)
    whole = _hash(weight, bias, norm)
    assert whole == _hash(weight.float(), bias.double(), FinalNorm("rms", norm.weight, None, 2e-6))
    assert re.fullmatch("[0-9a-f]{64}", whole)
    others = [_hash(weight), _hash(weight, bias), _hash(weight, None, norm), _hash(weight.reshape(5, 11), bias, norm)]
    others.append(_hash(weight, bias, FinalNorm("layer", norm.weight, None, 1e-6)))
    others.append(_hash(weight, bias, FinalNorm("rms", None, norm.weight, 1e-6)))
    for i in range(weight.numel()):
        changed = weight.clone()
        changed.view(-1)[i] += 1
        others.append(_hash(changed, bias, norm))
    assert len({whole, *others}) == len(others) + 1


def test_zero_has_one_sign_in_the_hash():
    assert _hash(torch.tensor([[0.0, 1.0]])) == _hash(torch.tensor([[-0.0, 1.0]]))


def test_the_hash_does_not_change_between_versions():
    weight = torch.arange(6.0).reshape(3, 2)
    digest = hashlib.sha256(b"unembed head 1 (3, 2)")
    digest.update(hashlib.sha256(weight.numpy().tobytes()).digest() + b"none")
    assert _hash(weight) == digest.hexdigest()
    two_chunks = torch.arange(1_200_000.0).reshape(1200, 1000)
    assert _hash(two_chunks) == "f9dc9af2840442d474d72b455f429a6ed40f7144fe7e92d3baaab5a8aea4107d"


def test_chunks_are_read_in_order(monkeypatch, draw):
    weight = draw(1000, 3)
    monkeypatch.setattr(_checks, "_CHUNK_ELEMENTS", 30)
    scan = _checks.Scan.of(weight)
    assert torch.equal(scan.magnitudes, weight.abs().amax(1))
    assert scan.digests == b"".join(hashlib.sha256(part.numpy().tobytes()).digest() for part in weight.split(10))


def test_every_code_used_is_in_the_table_and_the_other_way_round():
    source = "".join(path.read_text() for path in Path(_checks.__file__).parent.glob("*.py"))
    used = set(re.findall(r'Check\(\s*"(UNE\d{3})"', source))
    assert used == set(_checks.CODES)


def test_failed_checks_raise():
    assert _checks.require(Check("UNE004", "ok", "fine")).message == "fine"
    with pytest.raises(IntegrityError, match=r"bad \[UNE004\]"):
        _checks.require(Check("UNE004", "failed", "bad"))


def test_each_code_is_checked_once_and_in_order(write, tensors, config):
    codes = [check.code for check in Unembedding.load(write(tensors, config, tokens=8)).integrity]
    assert codes == sorted(_checks.CODES)
