"""The tokenizer interface JetStream's Driver asks an engine for, over ids."""

from __future__ import annotations

from typing import Any

import numpy as np

from jax_agent_rl.jetstream import compat
from jax_agent_rl.models.config import DecoderConfig

compat.engine_api()  # JetStream must be imported through the shim first

from jetstream.engine import tokenizer_api  # noqa: E402


class IdTokenizer(tokenizer_api.Tokenizer):
    """Ids in, ids out; ``encode``/``decode`` work when a Hugging Face tokenizer was given."""

    def __init__(self, config: DecoderConfig, tokenizer: Any = None) -> None:
        self._config = config
        self._tokenizer = tokenizer

    def encode(self, s: str, **kwargs: Any) -> tuple[np.ndarray, int]:
        ids = np.array(self._need().encode(s, add_special_tokens=False), np.int32)
        return ids, len(ids)

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        return self._need().decode(token_ids)

    def _need(self) -> Any:
        if self._tokenizer is None:
            raise ValueError("this engine was built without a tokenizer: send token ids, not text")
        return self._tokenizer

    @property
    def pad_id(self) -> int:
        return self.eos_id

    @property
    def eos_id(self) -> int:
        return self._config.eos_token_ids[0]

    @property
    def bos_id(self) -> int:
        return self._config.bos_token_id if self._config.bos_token_id is not None else self.eos_id

    @property
    def stop_tokens(self) -> set[int]:
        return set(self._config.eos_token_ids)
