"""What config.json says about the output layer, with the defaults of its family."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unembed.models import _families as families
from unembed.results import Check, InputError


def read_json(path: Path, kind: type = dict) -> Any:
    """The object (or list) in a JSON file.

    Raises:
        InputError: If the file cannot be read or holds something else; names the file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{path}: expected JSON, could not read it ({error}); fetch the file again.") from None
    if not isinstance(content, kind):
        raise InputError(
            f"{path}: expected a JSON {kind.__name__}, got {type(content).__name__}; fetch the file again."
        )
    return content


@dataclass(frozen=True)
class ModelConfig:
    """A config with its text part singled out; fields are looked up in the text part first.

    Args:
        top: The whole config.
        where: How messages name it: the path of config.json.
    """

    top: dict[str, Any]
    where: str

    @property
    def text(self) -> dict[str, Any]:
        """The part about the language model; of a config that is only that, the whole."""
        config = self.top
        for _ in range(2):  # thinker_config.text_config
            config = next(
                (config[name] for name in families.TEXT_CONFIGS if isinstance(config.get(name), dict)), config
            )
        return config

    @property
    def model_types(self) -> tuple[str, ...]:
        """Family names, the text part's first."""
        names = (self.text.get("model_type"), self.top.get("model_type"))
        return tuple(dict.fromkeys(name for name in names if isinstance(name, str) and name))

    @property
    def architecture(self) -> str:
        """The family name for messages."""
        return self.model_types[0] if self.model_types else "unknown"

    def get(self, name: str) -> Any:
        """A field of the text part, else of the whole; None where neither has it."""
        value = self.text.get(name)
        return self.top.get(name) if value is None else value

    def number(self, name: str) -> float | None:
        """A field that must be a number.

        Raises:
            InputError: If it is there and is not.
        """
        value = self.get(name)
        if value is None:
            return None
        # Compared before it is converted: JSON has NaN and integers of any length.
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
            raise InputError(f"{self.where}: `{name}` must be a number, got {str(value)[:40]}; correct the field.")
        return float(value)

    def count(self, *names: str) -> int | None:
        """The first of the fields `names` that is there, as an int."""
        return next((int(value) for value in map(self.number, names) if value is not None), None)

    def of_family(self, table: dict[str, Any]) -> Any:
        """The entry of `table` for this family, None without one."""
        return next((table[name] for name in self.model_types if name in table), None)

    @property
    def tied(self) -> bool | None:
        """`tie_word_embeddings`; None where it is not said. True in the text part counts, as in transformers."""
        values = [part["tie_word_embeddings"] for part in (self.top, self.text) if "tie_word_embeddings" in part]
        values = [value for value in values if value is not None]
        for value in values:
            if not isinstance(value, bool):
                raise InputError(
                    f"{self.where}: `tie_word_embeddings` must be true or false, got {value!r}; correct it."
                )
        return any(values) if values else None

    @property
    def tied_by_default(self) -> bool | None:
        """The family's default of `tie_word_embeddings`, None for a family that is not known."""
        if not any(name in families.NORMS or name in families.TIED for name in self.model_types):
            return None
        return any(name in families.TIED for name in self.model_types)

    def softcap(self) -> float | None:
        """The cap on the scores."""
        field, default = self.of_family(families.SOFTCAPS) or ("final_logit_softcapping", None)
        # A field that says null switches the cap off; one that is not there leaves the family's default.
        value = self.number(field) if field in self.text or field in self.top else default
        if value is not None and value < 0:
            raise InputError(f"{self.where}: `{field}` must be positive or null, got {value}; correct the field.")
        return value or None

    def scale(self) -> float:
        """The factor on the scores."""
        scale, rule = 1.0, self.of_family(families.SCALES)
        if rule is not None:
            field, power, default = rule
            value = self.number(field)
            value = default if value is None else value
            if not value > 0:
                raise InputError(f"{self.where}: `{field}` must be positive, got {value}; correct the field.")
            scale *= value**power
        elif not self.known:
            # A family we do not know: the field names mean what they mean everywhere else.
            scale *= (self.number("logit_scale") or 1.0) / (self.number("logits_scaling") or 1.0)
        base = self.of_family(families.BASE_WIDTH)
        width = self.count("hidden_size")
        if base is not None and width:
            scale *= (self.number(base[0]) or base[1]) / width
        return scale

    @property
    def known(self) -> bool:
        """Whether the family is in the tables."""
        return any(name in families.NORMS for name in self.model_types)

    def check_scores(self) -> Check:
        """UNE010: which rule for scale and soft-cap was followed."""
        scale, softcap = self.scale(), self.softcap()
        said = f"scores = {'' if scale == 1.0 else f'{scale:.6g} * '}(h W^T + b)"
        said += "" if softcap is None else f", soft-capped at {softcap:g}"
        unused = self.of_family(families.UNUSED_SCALES)
        if unused and self.get(unused) is not None:
            return Check("UNE010", "note", f"{said}; `{unused}` of {self.where} is not used, as in transformers.")
        if not self.known:
            message = (
                f"{said}: model_type {self.architecture} is not known, so only the usual fields were read; "
                "compare with the model."
            )
            return Check("UNE010", "warning", message)
        return Check("UNE010", "ok", f"{said}.")

    def refuse_other_kinds(self) -> None:
        """Refuse what has no next-token head over its own vocabulary.

        Raises:
            InputError: For encoders and encoder-decoders.
        """
        names = self.top.get("architectures") or []
        names = [str(name) for name in names] if isinstance(names, list) else [str(names)]
        listed = f"{self.where}: {', '.join(names) or self.architecture}"
        reads = "unembed reads decoder-only language models with a linear head."
        if self.top.get("is_encoder_decoder") is True or set(self.model_types) & families.ENCODER_DECODERS:
            raise InputError(f"{listed} is an encoder-decoder; {reads}")
        if set(self.model_types) & families.ENCODERS or any(name.endswith("ForMaskedLM") for name in names):
            raise InputError(
                f"{listed} predicts masked tokens or transforms the hidden state before its matrix; {reads}"
            )
        if any(name.endswith(("Classification", "QuestionAnswering")) for name in names):
            raise InputError(f"{listed} has no unembedding; give the language model it was made from.")
