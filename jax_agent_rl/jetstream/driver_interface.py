"""The JAX engine behind JetStream's abstract ``Engine``, for JetStream's own Driver.

The Driver prefills one request at a time and decodes one greedy step at a time. The slots of a
decode state have as many pages as the longest context, side by side. Nothing else of the package
needs google-jetstream.

JetStream 0.2.2 is imported without its TensorFlow dependency. ``jetstream.engine.token_utils``
imports ``seqio`` (and through it TensorFlow, 3 GB) only for a tokenizer class that an id-in, id-out
engine never builds. Where seqio is not installed, two empty modules stand in for it; where it is
installed, the real one is used. See ``third_party/jetstream.md``.
"""

from __future__ import annotations

import functools
import sys
import types
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jax_agent_rl.errors import ModelError
from jax_agent_rl.jetstream import programs
from jax_agent_rl.jetstream.decode_batch import MAX_STOP_IDS, DecodeBatch, Extension
from jax_agent_rl.jetstream.engine import JaxEngine
from jax_agent_rl.jetstream.forward import EngineParams
from jax_agent_rl.jetstream.kv_cache import KVCache
from jax_agent_rl.jetstream.recurrent_states import get_state, put_state
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.utils.packages import install_command, is_installed


def _import_engine_api() -> types.ModuleType:
    """Import ``jetstream.engine.engine_api``.

    Raises:
        ModelError: google-jetstream is not installed.
    """
    if not is_installed("jetstream"):
        raise ModelError(
            "google-jetstream is not installed, which JetStream's Driver comes with:"
            f" {install_command('jetstream')} && pip install --no-deps google-jetstream==0.2.2"
        )
    if not is_installed("seqio"):
        # With the two class names that JetStream's annotations use.
        seqio = types.ModuleType("seqio")
        vocabularies = types.ModuleType("seqio.vocabularies")
        vocabulary = type("Vocabulary", (), {})
        sentence_piece = type("SentencePieceVocabulary", (vocabulary,), {})
        vars(vocabularies).update(Vocabulary=vocabulary, SentencePieceVocabulary=sentence_piece)
        vars(seqio).update(vocabularies=vocabularies)
        sys.modules.setdefault("seqio", seqio)
        sys.modules.setdefault("seqio.vocabularies", vocabularies)
    from jetstream.engine import engine_api as module

    return module


engine_api = _import_engine_api()

from jetstream.engine import tokenizer_api, tokenizer_pb2  # noqa: E402

_PREFIX_STATE = 1
"""Slot of a prefix's recurrent state, and of the first slot's."""


@struct.dataclass
class EnginePrefix:
    """The KV of one prefilled context without its last id; ``cache`` has the pages of slot 0."""

    cache: KVCache
    last_token: jax.Array  # int32 []
    length: jax.Array  # int32 [], ids in the cache


@struct.dataclass
class DecodeState:
    """Everything a generation step of the Driver transforms; arrays are [slots]."""

    cache: KVCache
    tokens: jax.Array
    positions: jax.Array
    generated: jax.Array


@struct.dataclass
class ResultTokens(engine_api.ResultTokens):
    """JetStream's result array with one more column: the bits of each id's float32 log-prob."""

    def convert_to_numpy(self) -> ResultTokens:
        return self.replace(data=np.array(self.data))

    def log_probs(self) -> np.ndarray:
        """Return float32 [slots]; call ``convert_to_numpy`` first."""
        return np.ascontiguousarray(self.data[:, -1]).view(np.float32)


class JetStreamEngine(engine_api.Engine):
    """An engine as JetStream's Driver calls it.

    Args:
        engine: computes, by the programs of rollouts.
        tokenizer: Hugging Face tokenizer; None takes and gives ids only.
    """

    def __init__(self, engine: JaxEngine, tokenizer: Any = None) -> None:
        self._engine = engine
        self._tokenizer = tokenizer

    def load_params(self, params: Params) -> EngineParams:
        """Copy the learner's parameter tree into the engine's layout and precision."""
        return self._engine.load_params(params)

    def prefill(
        self,
        *,
        params: EngineParams,
        existing_prefix: EnginePrefix | None = None,
        padded_tokens: jax.Array,
        true_length: int,
    ) -> EnginePrefix:
        """Prefill a context; with ``existing_prefix`` the tokens continue it."""
        shapes = self._engine.shapes
        ids = np.asarray(padded_tokens)[:true_length].astype(np.int32)
        if existing_prefix is None:
            start = 0
            cache = self._engine.empty_cache(shapes.context_pages)
        else:
            start = int(existing_prefix.length)
            cache = jax.tree.map(jnp.copy, existing_prefix.cache)
            ids = np.concatenate([np.asarray(existing_prefix.last_token)[None], ids])

        end = start + len(ids)
        if end > shapes.max_model_len:
            raise ValueError(f"{end} ids do not fit max_model_len={shapes.max_model_len}")

        # The last id is not prefilled: the first decode step feeds it.
        extension = Extension(shapes.pages_of_slot(0), start, ids[:-1], state=_PREFIX_STATE)
        cache = self._engine.extend(params, cache, [extension])
        return EnginePrefix(cache=cache, last_token=jnp.int32(ids[-1]), length=jnp.int32(end - 1))

    def init_decode_state(self) -> DecodeState:
        """Return a state of ``max_concurrent_decodes`` empty slots."""
        slots = self.max_concurrent_decodes
        cache = self._engine.empty_cache(slots * self._engine.shapes.context_pages)
        return DecodeState(
            cache=cache,
            tokens=jnp.zeros(slots, jnp.int32),
            positions=jnp.zeros(slots, jnp.int32),
            generated=jnp.zeros(slots, jnp.int32),
        )

    def insert(self, prefix: EnginePrefix, decode_state: DecodeState, slot: int) -> DecodeState:
        """Put a prefilled context into a slot."""
        return _insert(prefix, decode_state, jnp.int32(slot))

    def generate(
        self, params: EngineParams, decode_state: DecodeState
    ) -> tuple[DecodeState, ResultTokens]:
        """Run one greedy step for every slot; ``ResultTokens`` also carries log-probs."""
        state, data = self._generate_step(params, decode_state)
        return state, ResultTokens(
            data=data, tokens_idx=(0, 1), valid_idx=(1, 2), length_idx=(2, 3), samples_per_slot=1
        )

    @functools.cached_property
    def _generate_step(self) -> Any:
        context = self._engine.context
        shapes = context.shapes
        slots = self.max_concurrent_decodes
        step_once = programs.decode_program(context.config, 1, context.split, context.kernels)
        pages = np.array([shapes.pages_of_slot(slot) for slot in range(slots)], np.int32)
        states = None
        if context.has_states:
            states = jnp.arange(_PREFIX_STATE, _PREFIX_STATE + slots, dtype=jnp.int32)

        def step(params: EngineParams, state: DecodeState) -> tuple[DecodeState, jax.Array]:
            batch = DecodeBatch(
                pages=jnp.asarray(pages),
                tokens=state.tokens,
                positions=state.positions,
                remaining=jnp.ones(slots, jnp.int32),
                temperature=jnp.zeros(slots),
                seed=jnp.zeros(slots, jnp.uint32),
                stop_ids=jnp.full((slots, MAX_STOP_IDS), -1, jnp.int32),
                states=states,
            )
            limits = jnp.array([1, slots + 1], jnp.int32)
            cache, out = step_once(params, state.cache, batch, limits)
            ids = out[0, 0]
            log_prob_bits = out[1, 0]
            # JetStream's Driver keeps stepping idle slots: hold them inside their pages.
            positions = jnp.minimum(state.positions + 1, shapes.cache_length - 1)
            generated = state.generated + 1
            data = jnp.stack([ids, jnp.ones_like(ids), generated, log_prob_bits], axis=1)
            state = DecodeState(cache=cache, tokens=ids, positions=positions, generated=generated)
            return state, data

        return jax.jit(step, donate_argnums=(1,))

    def get_prefix_destination_sharding(self) -> Any:
        """Return the shardings of a prefix: the engine's."""
        context = self._engine.context
        shardings: Any = EnginePrefix  # a tree of shardings in place of arrays
        return shardings(
            cache=context.cache_sharding,
            last_token=context.replicated,
            length=context.replicated,
        )

    def get_tokenizer(self) -> Any:
        """Return empty parameters: ``build_tokenizer`` needs none."""
        # The class is made when the module is imported.
        return tokenizer_pb2.TokenizerParameters()  # pyright: ignore[reportAttributeAccessIssue]

    def build_tokenizer(self, metadata: Any) -> IdTokenizer:
        """Return the tokenizer of JetStream's Driver."""
        return IdTokenizer(self._engine.config, self._tokenizer)

    @property
    def max_concurrent_decodes(self) -> int:
        return self._engine.shapes.max_concurrent_decodes

    @property
    def samples_per_slot(self) -> int:
        return 1

    @property
    def max_prefill_length(self) -> int:
        """A power of two, as JetStream pads prompts to powers of two."""
        return 1 << (self._engine.shapes.max_model_len.bit_length() - 1)

    @property
    def mesh(self) -> jax.sharding.Mesh:
        return self._engine.context.mesh

    @property
    def colocated_cpus(self) -> list[Any] | None:
        return None


@functools.partial(jax.jit, donate_argnums=(1,))
def _insert(prefix: EnginePrefix, state: DecodeState, slot: jax.Array) -> DecodeState:
    first_page = 1 + slot * (prefix.cache.count - 1)

    def write(pages: jax.Array, prefix_pages: jax.Array) -> jax.Array:
        without_null_page = prefix_pages[1:]
        return jax.lax.dynamic_update_slice_in_dim(pages, without_null_page, first_page, axis=0)

    cache = jax.tree.map(write, state.cache.pages, prefix.cache.pages)
    cache = replace(cache, states=state.cache.states)
    prefix_state = get_state(prefix.cache, jnp.int32(_PREFIX_STATE))
    return DecodeState(
        cache=put_state(cache, prefix_state, slot + _PREFIX_STATE),
        tokens=state.tokens.at[slot].set(prefix.last_token),
        positions=state.positions.at[slot].set(prefix.length),
        generated=state.generated.at[slot].set(0),
    )


class IdTokenizer(tokenizer_api.Tokenizer):
    """Stop ids for the Driver.

    ``encode`` and ``decode`` work if a Hugging Face tokenizer was given.
    """

    def __init__(self, config: DecoderConfig, tokenizer: Any = None) -> None:
        self._config = config
        self._tokenizer = tokenizer

    def encode(self, s: str, **kwargs: Any) -> tuple[np.ndarray, int]:
        ids = np.array(self._require().encode(s, add_special_tokens=False), np.int32)
        return ids, len(ids)

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        return self._require().decode(token_ids)

    def _require(self) -> Any:
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
        if self._config.bos_token_id is None:
            return self.eos_id
        return self._config.bos_token_id

    @property
    def stop_tokens(self) -> set[int]:
        return set(self._config.eos_token_ids)
