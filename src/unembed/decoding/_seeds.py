"""The seeded draws of `ops`, which heads use too, under the name that decoding knows."""

from unembed.ops._seeds import Noise, Numbers, Stream, generated, uniforms, words

__all__ = ["Noise", "Numbers", "Stream", "generated", "uniforms", "words"]
