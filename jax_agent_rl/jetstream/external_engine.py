"""User-supplied engines of JetStream's later API, such as MaxText's MaxEngine.

That API (JetStream 0.3.0) differs from 0.2.2's in what is used here: ``prefill`` also returns the first sampled id, and
``ResultTokens`` has ``log_prob``. The user describes the arguments an engine takes beyond it in
:class:`ExternalEngine`; see ``third_party/jetstream.md``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jax_agent_rl.errors import ConfigError
from jax_agent_rl.jetstream.engine import EngineShapes, bucket
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.utils.plugins import load_user_module

KEY = "rollout.jetstream.engine_factory"


@dataclass(frozen=True, kw_only=True)
class ExternalEngine:
    """What the function named by ``rollout.jetstream.engine_factory`` returns.

    Attributes:
        engine: an ``Engine`` of JetStream's later API whose ``prefill`` and ``generate`` also take ``rng``, a jax key,
            and whose log-probs are of the raw logits.
        to_params: maps the learner's parameter tree to the engine's params.
        max_new_tokens: ids a slot can hold after its prompt (the engine may then overwrite the oldest).
        sampled: further arguments of ``prefill`` and ``generate`` to sample at temperature 1 from all ids.
        greedy: the same for greedy decoding; None if the engine cannot.
    """

    engine: Any
    to_params: Callable[[Params], Any]
    max_new_tokens: int
    sampled: Mapping[str, Any] = field(default_factory=dict)
    greedy: Mapping[str, Any] | None = None


MakeEngine = Callable[[DecoderConfig, EngineShapes], ExternalEngine]


def load_engine_function(where: str) -> MakeEngine:
    """Load the function named by ``package.module:function`` or ``file.py:function``.

    Raises:
        ConfigError: there is no such function.
    """
    module_name, colon, name = where.rpartition(":")
    if not colon:
        raise ConfigError(f"{KEY}={where!r} names no function; write package.module:function or file.py:function")
    function = getattr(load_user_module(module_name, key=KEY), name, None)
    if not callable(function):
        raise ConfigError(f"{KEY}={where!r}: {module_name} has no function {name!r}")
    return cast(MakeEngine, function)


class ExternalEngineAdapter:
    """An external engine as :class:`ExternalScheduler` drives it: slots, host arrays, a key per call. Not thread-safe.

    Args:
        external: the engine and how to call it.
        config: the model.
        shapes: what the rollout was configured for.

    Raises:
        ConfigError: the engine is too small, or lacks something.
    """

    adapters: tuple[str, ...] = ()

    def __init__(self, external: ExternalEngine, config: DecoderConfig, shapes: EngineShapes) -> None:
        self.config = config
        self.shapes = shapes
        self.max_new_tokens = external.max_new_tokens
        self._external = external
        self._engine = external.engine
        self._check()

    @property
    def max_concurrent_decodes(self) -> int:
        """As configured; further slots of the engine stay empty."""
        return self.shapes.max_concurrent_decodes

    @property
    def can_be_greedy(self) -> bool:
        return self._external.greedy is not None

    def load_params(self, params: Params, old: Any = None) -> Any:
        """Copy the learner's tree into the engine's params.

        Args:
            params: the learner's tree.
            old: ignored, so two sets of weights exist for a moment.
        """
        leaves, tree = jax.tree.flatten(self._external.to_params(params))
        for i, leaf in enumerate(leaves):
            leaves[i] = jnp.copy(leaf)  # leaves may share the learner's memory, which its next step donates
        return jax.tree.unflatten(tree, leaves)

    def init_cache(self) -> Any:
        """Return an empty decode state."""
        return self._engine.init_decode_state()

    def prefill(self, params: Any, ids: np.ndarray, key: jax.Array, *, greedy: bool) -> tuple[Any, Any]:
        """Prefill one prompt, int32 [n]; return its prefix and a result with the first sampled id."""
        padded = np.zeros(bucket(self._buckets, len(ids)), np.int32)
        padded[: len(ids)] = ids
        return self._engine.prefill(
            params=params, padded_tokens=jnp.asarray(padded), true_length=len(ids), rng=key, **self._sampling(greedy)
        )

    def insert(self, prefix: Any, state: Any, slot: int) -> Any:
        """Put a prefilled context into a slot; both arguments are donated."""
        return self._engine.insert(prefix, state, slot)

    def generate(self, params: Any, state: Any, key: jax.Array, *, greedy: bool) -> tuple[Any, Any]:
        """Step every slot, filled or not; return state and result."""
        return self._engine.generate(params, state, rng=key, **self._sampling(greedy))

    def free(self, slot: int) -> None:
        """Free a slot whose request has ended."""
        self._engine.free_resource(slot)

    def warm_up(self, params: Any, state: Any, say: Callable[[str], None]) -> Any:
        """Run every program once and check its results.

        Args:
            params: the engine's.
            state: the decode state, donated.
            say: called with a line of progress before each program.

        Raises:
            ConfigError: results have no log-probs.
        """
        modes = [False, True] if self.can_be_greedy else [False]
        jobs = [(size, greedy) for greedy in modes for size in self._buckets]
        found: list[np.ndarray] = []
        for number, (size, greedy) in enumerate(jobs, 1):
            say(f"compiling prompts of {size}{', greedy' if greedy else ''} ({number} of {len(jobs)})")
            key = jax.random.key_data(jax.random.key(number))
            prefix, first = self.prefill(params, np.arange(size, dtype=np.int32) % 2, key, greedy=greedy)
            state = self.insert(prefix, state, 0)
            state, second = self.generate(params, state, key, greedy=greedy)
            found += [log_probs for _, log_probs in read_results([first, second])]
        self.free(0)
        if not any(x.any() for x in found):
            raise ConfigError(
                f"{KEY}: the engine returns log-probs of exactly 0 for every id; switch them on (MaxText: "
                "return_log_prob=true)"
            )
        return state

    @property
    def _buckets(self) -> tuple[int, ...]:
        """Padded prompt lengths; the last holds any prompt."""
        longest = self.shapes.max_model_len - 1
        return (*(b for b in self.shapes.prefill_buckets if b < longest), self._engine.max_prefill_length)

    def _sampling(self, greedy: bool) -> Mapping[str, Any]:
        arguments = self._external.greedy if greedy else self._external.sampled
        assert arguments is not None  # such requests are refused at submission
        return arguments

    def _check(self) -> None:
        engine, shapes = self._engine, self.shapes
        slots, longest = engine.max_concurrent_decodes, engine.max_prefill_length
        if slots < shapes.max_concurrent_decodes:
            raise ConfigError(
                f"{KEY}: the engine has {slots} slots, but rollout.jetstream.max_concurrent_decodes="
                f"{shapes.max_concurrent_decodes}; lower it, or build the engine with more (MaxText: "
                "per_device_batch_size times devices)"
            )
        if longest < shapes.max_model_len - 1:
            raise ConfigError(
                f"{KEY}: the engine prefills at most {longest} ids, but a context of rollout.max_model_len="
                f"{shapes.max_model_len} is prefilled whole at every turn; build it for {shapes.max_model_len - 1} "
                "(MaxText: max_prefill_predict_length)"
            )
        if engine.samples_per_slot != 1:
            raise ConfigError(f"{KEY}: the engine decodes {engine.samples_per_slot} samples per slot; it must be 1")
        for name in ("prefill", "generate"):
            if "rng" not in inspect.signature(getattr(engine, name)).parameters:
                raise ConfigError(
                    f"{KEY}: {type(engine).__name__}.{name} takes no rng, so two servers would sample the same ids; "
                    "wrap the engine in one that does"
                )


def read_results(results: Sequence[Any]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Copy JetStream's ``ResultTokens`` to the host as ids int32 [slots] and log-probs float32 [slots].

    Raises:
        ConfigError: there are no log-probs.
    """
    if any(result.log_prob is None for result in results):
        raise ConfigError(f"{KEY}: ResultTokens.log_prob is None; switch log-probs on (MaxText: return_log_prob=true)")
    arrays = jax.device_get([(result.data, result.log_prob) for result in results])
    columns = [result.tokens_idx[0] for result in results]
    return [
        (np.asarray(data)[:, column], np.asarray(log_prob, np.float32).reshape(len(data)))
        for column, (data, log_prob) in zip(columns, arrays, strict=True)
    ]
