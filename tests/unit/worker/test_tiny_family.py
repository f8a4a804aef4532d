"""Rules for the fields of a tiny configuration."""

from __future__ import annotations

import dataclasses

from moediag.lab.step.models import tiny_family
from moediag.protocol import VOCAB


@dataclasses.dataclass
class Configuration:
    bos_token_id: int = 128000
    eos_token_id: int | list[int] | None = 128001
    pad_token_id: int | None = None
    image_token_id: int = 128256
    audio_token_id: int | None = None


def test_special_tokens_are_none_where_the_class_allows_it() -> None:
    tokens = {
        field.name: tiny_family._token(field.name, field.default, field)
        for field in dataclasses.fields(Configuration)
    }
    assert tokens == {
        "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0, "image_token_id": VOCAB - 1,
        "audio_token_id": None,
    }  # fmt: skip
