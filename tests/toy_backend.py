"""A toy language model and an engine over it, in memory, that obeys every rule of the protocol.

::

    backend = ToyBackend()                        # one id per running request and loop tick
    subject = toy_subject(lambda: ToyBackend())   # for the conformance suite

Tests break it on purpose by overriding one of its small methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jax_agent_rl.errors import BackendError, WeightUpdateError
from jax_agent_rl.rollout.protocol import (
    Capabilities,
    GenerateRequest,
    RolloutBackend,
    WeightUpdate,
)
from jax_agent_rl.testing.conformance.backends import (
    ADAPTED,
    ADAPTER,
    BASE,
    MIXED,
    OTHER,
    BackendUnderTest,
    ServedBackend,
)
from jax_agent_rl.testing.conformance.models import log_softmax, truncate
from jax_agent_rl.types import PauseMode, TokenScores
from jax_agent_rl.types.supports import encode_supports
from jax_agent_rl.utils.weight_transfer import check_files
from tests.batching_engine import BatchingEngine, Run

EOS = 2
VOCAB = 61
IMAGE = 60
LAYERS = 3
EXPERTS = 6
PER_TOKEN = 2
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


class ToyModel:
    """Scores the next id from the last two; ``which`` seeds the tables."""

    def __init__(self, which: str) -> None:
        rng = np.random.default_rng([1, len(which)])
        self.last = rng.standard_normal((VOCAB, VOCAB)) * 2
        self.before = rng.standard_normal((VOCAB, VOCAB))
        self.routers = rng.standard_normal((VOCAB, VOCAB, LAYERS, EXPERTS))

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Return logits, float64 [T, V]."""
        now = np.asarray(ids)
        return self.last[now] + self.before[np.concatenate([[0], now[:-1]])]

    def router_scores(self, ids: Sequence[int]) -> np.ndarray:
        """Return the scores of experts, float64 [T, L, E]."""
        now = np.asarray(ids)
        return self.routers[now, np.concatenate([[0], now[:-1]])]


def mixture(base: ToyModel) -> ToyModel:
    """Return ``base`` with one of ``OTHER``'s two tables."""
    mixed = ToyModel(OTHER)
    mixed.before = base.before
    return mixed


MODELS = {which: ToyModel(which) for which in (BASE, OTHER, ADAPTED)}
MODELS[MIXED] = mixture(MODELS[BASE])


class ToyReference:
    def logits(self, ids: Sequence[int], *, weights: str) -> np.ndarray:
        return MODELS[weights].logits(ids)

    def router_scores(self, ids: Sequence[int], *, weights: str) -> np.ndarray:
        return MODELS[weights].router_scores(ids)


def to_text(ids: Sequence[int]) -> str:
    """Decode each id as one letter."""
    return "".join(_LETTERS[i % 26] for i in ids)


class ToyMedia:
    """Media of which an image takes two ids."""

    placeholders = {"image": IMAGE}

    def expand(self, ids: Sequence[int], media: Mapping[str, Sequence[Any]]) -> list[int]:
        expanded = []
        for id_ in ids:
            expanded += [IMAGE, IMAGE] if id_ == IMAGE else [id_]
        return expanded


def toy_subject(make: Callable[[], RolloutBackend], **fields: Any) -> BackendUnderTest:
    """Build a subject over the toy model; the payload of an update names the weight set."""
    standard = {
        "name": "toy",
        "make": make,
        "reference": ToyReference(),
        "payload": lambda kind, which: which,
        "vocab_size": VOCAB,
        "eos_ids": frozenset({EOS}),
        "decode_text": to_text,
        "media": ToyMedia(),
        "adapter": True,
        "tolerance": 1e-9,
        "timeout": 30.0,
    }
    return BackendUnderTest(**standard | fields)


class ToyBackend(BatchingEngine):
    """Continuous batching over :class:`ToyModel`.

    Args:
        max_concurrent: requests decoded concurrently.
        tick_seconds: pause before each step; 0 only yields to the event loop.
        capabilities: declared capabilities that differ from the default.
    """

    name = "toy backend"

    def __init__(
        self, *, max_concurrent: int = 4, tick_seconds: float = 0.0, **capabilities: Any
    ) -> None:
        declared = Capabilities(
            max_model_len=200,
            max_concurrent=max_concurrent,
            sampling_replay=True,
            pause_modes=frozenset(PauseMode),
            in_flight_update=True,
            prefix_reuse=True,
            partial_update=True,
            priorities=True,
            scoring=True,
            weight_payloads=frozenset({"toy"}),
        )
        super().__init__(replace(declared, **capabilities), tick_seconds=tick_seconds, eos=EOS)
        self.model = MODELS[BASE]
        self.cache: set[tuple[int, ...]] = set()

    def check_request(self, request: GenerateRequest) -> None:
        super().check_request(request)
        if not all(0 <= i < VOCAB for i in request.prompt_ids):
            raise BackendError(f"prompt ids must be in [0, {VOCAB})")
        if request.multi_modal.keys() - self.capabilities.multi_modal:
            raise BackendError("the toy backend takes no media that it does not declare")
        if request.lora not in ((None, ADAPTER) if self.capabilities.lora else (None,)):
            raise BackendError(f"the toy backend has no adapter {request.lora!r}")
        if request.prompt_ids.count(IMAGE) < 2 * len(request.multi_modal.get("image", ())):
            raise BackendError("an image takes two placeholders")

    def admit(self, run: Run) -> None:
        prompt = run.request.prompt_ids
        keys = [self.key(run, n) for n in range(len(prompt) + 1)]
        run.cached = next((n for n in range(len(prompt) - 1, 0, -1) if keys[n] in self.cache), 0)
        self.cache.update(keys[1:])
        self._count(cached_tokens=run.cached, prefill_tokens=len(prompt) - run.cached)
        super().admit(run)

    def step(self, run: Run) -> None:
        if run.request.sampling.restricted and self.capabilities.sampling_replay:
            run.supports += encode_supports(self.kept(run))
        super().step(run)
        self.cache.add(self.key(run, len(run.context)))

    def key(self, run: Run, count: int) -> tuple:
        """Return the cache key of a context's first ids."""
        ids = (*run.request.prompt_ids, *run.ids)[:count]
        return ids + tuple(self.images(run)[: -(-ids.count(IMAGE) // 2)]) + (run.request.lora,)

    def weights(self, run: Run) -> ToyModel:
        """Return the model of a request; the adapter exists merged into the first weights only."""
        return self.model if run.request.lora is None else MODELS[ADAPTED]

    def images(self, run: Run) -> list[bytes]:
        """Return the images that the model sees."""
        return [image.tobytes() for image in run.request.multi_modal.get("image", ())]

    def distribution(self, run: Run) -> np.ndarray:
        """Return the log-probs, float64 [V], from which the next id is drawn."""
        sampling = run.request.sampling
        logits = self.weights(run).logits(run.context[-2:])[-1:]
        for place, image in enumerate(self.images(run)):
            logits = logits + np.random.default_rng([place, *image[:8]]).standard_normal(VOCAB)
        if sampling.temperature:
            cut = {"top_p": sampling.top_p, "top_k": sampling.top_k, "min_p": sampling.min_p}
            logits = truncate(logits / sampling.temperature, **cut)
        return log_softmax(logits)[0]

    def kept(self, run: Run) -> np.ndarray:
        """Return the ids from which the next one is drawn, as bits uint32 [1, n]."""
        support = np.isfinite(self.distribution(run))
        padded = np.pad(support, (0, -VOCAB % 32))
        return np.packbits(padded, bitorder="little").view(np.uint32)[None]

    def sample(self, run: Run) -> tuple[int, float]:
        log_probs = self.distribution(run)
        if run.request.sampling.temperature == 0:
            token = int(log_probs.argmax())
        else:
            draw = np.random.default_rng([run.seed, len(run.context)]).random()
            cdf = np.exp(log_probs).cumsum()
            token = int(np.searchsorted(cdf, draw * cdf[-1], side="right"))
        return token, float(log_probs[token])

    def stop_match(self, run: Run) -> str | None:
        return super().stop_match(run) or next(
            (s for s in run.request.sampling.stop if s in to_text(run.ids)), None
        )

    async def load(self, update: WeightUpdate) -> None:
        which = self.read(update)
        if which not in MODELS:
            raise WeightUpdateError("the payload names no weight set")
        self.model = mixture(self.model) if update.partial else MODELS[which]

    def read(self, update: WeightUpdate) -> str:
        """Return the weight set that an update names, for kind ``safetensors`` in the text of its
        first file.
        """
        if update.kind != "safetensors":
            return update.payload if isinstance(update.payload, str) else ""
        check_files(update.payload, update.digests)
        try:
            return Path(update.payload[0]).read_text()
        except OSError as error:
            raise WeightUpdateError(f"the weights cannot be read: {error}") from error

    async def reset_prefix_cache(self) -> None:
        self.cache.clear()

    async def score(
        self, token_ids: Sequence[int], *, start: int = 1, top_k: int = 0
    ) -> TokenScores:
        if max(token_ids) >= VOCAB:
            raise BackendError(f"id {max(token_ids)} is not one of the model's {VOCAB}")
        logs = log_softmax(self.model.logits(token_ids[:-1]))[start - 1 :]
        order = np.argsort(-logs, axis=-1)[:, :top_k]
        return TokenScores(
            log_probs=tuple(logs[np.arange(len(logs)), token_ids[start:]].tolist()),
            top_ids=tuple(map(tuple, order.tolist())) if top_k else (),
            top_log_probs=(
                tuple(map(tuple, np.take_along_axis(logs, order, axis=1).tolist())) if top_k else ()
            ),
        )


def served_toy(**client) -> ServedBackend:
    return ServedBackend(
        lambda: ToyBackend(tick_seconds=0.001, weight_payloads=frozenset({"safetensors"})), **client
    )


def toy_files(folder: Path) -> Callable[[str, str], list[str]]:
    """Make payloads of kind ``safetensors``: a file that holds the name of the weight set."""

    def payload(kind: str, which: str) -> list[str]:
        file = folder / f"{which}.safetensors"
        file.write_text(which)
        return [str(file)]

    return payload
