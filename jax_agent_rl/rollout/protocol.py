"""The interface between agents and engines: every engine is a :class:`RolloutBackend`.

An agent never sees an engine, only ``generate``: ids in; ids, log-probs, versions and a reason out.
The engine never sees text, tools or messages. A backend declares in :class:`Capabilities` what it
can do; the conformance suite tests exactly that, and a caller that needs more is refused at start,
not in the middle of a run.

Life of a backend::

    start() ──► generate() … generate()        any number at once
                  │ abort(id)                  that request returns its ids so far, as ABORTED
                  │ pause(mode) / resume()     around a weight update
                  │ update_weights(update)     version and prefix cache change together
                  ▼
                close()                        running requests fail with BackendClosedError
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from jax_agent_rl.checks import check_bool, check_ids, check_int, check_str
from jax_agent_rl.errors import WeightUpdateError
from jax_agent_rl.types import (
    PauseMode,
    SamplingParams,
    StopReason,
    Support,
    TokenOutput,
    TokenScores,
)

if TYPE_CHECKING:  # the launcher imports this module before anything is installed
    from jax_agent_rl.utils.weight_transfer import LogprobProbe


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What a backend can do. False means: calling it raises ``NotImplementedError``.

    Attributes:
        max_model_len: maximum ids of prompt + output in one context.
        max_concurrent: requests decoded at the same time (more may be queued).
        logprobs: log-probs are of the distribution sampled from (after temperature, min-p,
            top-k, top-p).
        any_sampling: any temperature, top_p, top_k and min_p. False: only temperature 1 of the
            whole vocabulary, and 0; other requests are a BackendError.
        sampling_replay: ``TokenOutput.supports`` has the ids that top-p, top-k, min-p and a grammar
            left at each draw, and log-probs are normalized over them, so that a learner can score
            restricted draws exactly.
        seeds: a request's ``seed`` makes it reproducible whatever else is in the batch.
        stop_strings: ``SamplingParams.stop`` is honoured.
        grammars: ``SamplingParams.grammar`` is honoured; a grammar that cannot be compiled is a
            BackendError. Without ``sampling_replay`` all ids under a grammar are marked in
            ``TokenOutput.constrained``. Log-probs are of the distribution without what was
            excluded.
        streaming: ``stream`` yields chunks as they are sampled.
        abort: ``abort`` returns partial outputs.
        pause_modes: modes ``pause`` accepts.
        in_flight_update: weights may change while requests are frozen by ``PauseMode.KEEP``; each
            token carries the version that produced it.
        prefix_reuse: KV of a common prefix is reused and counted in ``cached_tokens``.
        partial_update: a weight update may name some of the parameters only.
        priorities: ``GenerateRequest.priority`` orders the queue.
        multi_modal: kinds of non-text input, e.g. ``{"image"}``.
        lora: adapters can be named per request.
        routed_experts: outputs say which experts each position of the context chose, from
            ``GenerateRequest.routed_experts_prompt_start`` to the last id but one: that id was
            never fed.
        scoring: ``score`` gives log-probs of given ids.
        sleep: ``sleep``/``wake`` release and restore device memory.
        precision: the coarsest rounding of weights, activations and KV: ``float32``, ``float16``,
            ``bfloat16``, ``int8`` or ``fp8``. How closely engine and learner have to agree follows
            from it.
        weight_dtype: dtype to which the engine rounds all weights as it takes them, one by one:
            sent in it, they are the same. ``float32`` sends them as they are.
        weight_payloads: kinds of updates that ``update_weights`` takes, see ``WeightUpdate``.
    """

    max_model_len: int
    max_concurrent: int
    logprobs: bool = True
    any_sampling: bool = True
    sampling_replay: bool = False
    seeds: bool = True
    stop_strings: bool = True
    grammars: bool = False
    streaming: bool = True
    abort: bool = True
    pause_modes: frozenset[PauseMode] = frozenset()
    in_flight_update: bool = False
    prefix_reuse: bool = False
    partial_update: bool = False
    priorities: bool = False
    multi_modal: frozenset[str] = frozenset()
    lora: bool = False
    routed_experts: bool = False
    scoring: bool = False
    sleep: bool = False
    precision: str = "float32"
    weight_dtype: str = "float32"
    weight_payloads: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """One generation to run.

    Attributes:
        request_id: unique while the request runs; names it in ``abort`` and in logs.
        prompt_ids: the whole context. The engine decides how much of it is already in its KV cache.
        sampling: how to sample.
        session_id: shared by the requests of a trajectory: it keeps them on one server and hints
            that the next turn will extend the KV of this context.
        session_ends: no further turn of this session is expected; its KV may be reused for others
            first.
        priority: lower runs first; equal ones in order of arrival.
        multi_modal: images and videos (see :mod:`jax_agent_rl.utils.media`) by kind, in order of
            their placeholders; only kinds in ``Capabilities.multi_modal``. ``prompt_ids`` hold each
            placeholder as often as the model reads it: an engine that would condition on other ids
            raises ``TokenDriftError``.
        lora: adapter name, only with ``Capabilities.lora``.
        resumed: how many of the last prompt ids an interrupted part of this generation sampled: its
            grammar, if any, begins before them.
        routed_experts_prompt_start: how many of the first ids need no report of their experts,
            because earlier outputs reported them.

    Raises:
        ValueError: a value has the wrong type, or the prompt is empty.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    session_id: str | None = None
    session_ends: bool = False
    priority: int = 0
    multi_modal: Mapping[str, Any] = field(default_factory=dict)
    lora: str | None = None
    resumed: int = 0
    routed_experts_prompt_start: int = 0

    def __post_init__(self) -> None:
        check_str("request_id", self.request_id)
        if not self.prompt_ids:
            raise ValueError(f"request {self.request_id!r} has an empty prompt")
        check_ids(f"the prompt of request {self.request_id!r}", self.prompt_ids)
        if not isinstance(self.sampling, SamplingParams):
            raise ValueError(f"sampling={self.sampling!r}: must be SamplingParams")
        if self.session_id is not None:
            check_str("session_id", self.session_id)
        if self.lora is not None:
            check_str("lora", self.lora)
        check_bool("session_ends", self.session_ends)
        check_int("priority", self.priority)

        prompt_len = len(self.prompt_ids)
        check_int("resumed", self.resumed, least=0, below=prompt_len)
        check_int(
            "routed_experts_prompt_start",
            self.routed_experts_prompt_start,
            least=0,
            below=prompt_len + 1,
        )

        if not isinstance(self.multi_modal, Mapping):
            raise ValueError(
                f"multi_modal={self.multi_modal!r}: must be a mapping of kinds to images or videos"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenChunk:
    """Newly sampled ids of one request. The last chunk of a request carries ``final``.

    ``final`` is the whole output, equal to all chunks put together.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    policy_versions: tuple[int, ...]
    constrained: tuple[bool, ...] = ()
    supports: tuple[Support | None, ...] = ()
    final: TokenOutput | None = None

    @property
    def stop_reason(self) -> StopReason | None:
        return self.final.stop_reason if self.final else None


# Kinds of weight updates, by what their payload is.
ARRAYS = "arrays"
"""The learner's parameter tree, device arrays of this process: the engine copies them."""
MESH = "mesh"
"""None: each process of the learner keeps a copy of this version for its engine."""
FILES = "safetensors"
"""A list of file paths."""
SHARDS = "tensorstore"
"""The address of a version's folder, as ``models.stored`` writes it."""
PULL = "jax_transfer"
"""A :class:`~jax_agent_rl.utils.pull_tickets.PullOffer`, or the ticket for one pull of it."""
OBJECT_STORE = "object_store"
"""A kind, ``arrays`` or ``safetensors``, and a reference into Ray's object store."""
CUDA_IPC = "cuda_ipc"
"""Arrays of this process on one GPU of the machine, by their Hugging Face names."""
BROADCAST = "broadcast"
"""Arrays on one device, by their Hugging Face names, sent while the engine takes the update."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightUpdate:
    """New weights for an engine.

    Attributes:
        version: policy version of these weights; must be greater than the one served.
        kind: what ``payload`` is: ``arrays``, ``mesh``, ``safetensors``, ``tensorstore``,
            ``jax_transfer``, ``object_store``, ``cuda_ipc``, ``broadcast``, or a kind of a backend
            of your own.
        payload: opaque to everything between the learner and the engine.
        partial: only some parameters are named; the others stay.
        lasting: the payload stays valid until the next update is made, so a server that joins
            meanwhile can take it as well. Arrays are not lasting: the learner's next step reuses
            their memory.
        dtype: what the weights were rounded to, ``Capabilities.weight_dtype`` of the engines they
            are for; ``float32``: they are as the learner has them.
        digests: fingerprints of the payload's files or parts by name, checked before an engine
            takes anything; without any, files are not checked.
        deltas: delta files (``utils.weight_deltas``) that turn files of the previous version into
            files of ``payload``, and the digest of the file that each changes. Files without one
            are sent whole. None: the next version is sent whole as well, and a server need not keep
            these files.
        probe: log-probs of a few sequences, which the weights must reproduce where they arrive.
        adapters: the LoRA adapters that change, by name
            (:class:`~jax_agent_rl.models.lora.PeftAdapter`), together with the weights, or with
            ``partial`` and an empty payload alone; only with ``kind="arrays"``.
    """

    version: int
    kind: str
    payload: Any
    partial: bool = False
    lasting: bool = False
    dtype: str = "float32"
    digests: Mapping[str, str] = field(default_factory=dict)
    deltas: Mapping[str, str] | None = None
    probe: LogprobProbe | None = None
    adapters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the weights, by the files they are in; empty for parts and for no files.

        Another run, or the same one after it was rewound, may give other weights the same version.
        """
        # The launcher imports this module before it has the packages that fingerprints need.
        from jax_agent_rl.utils.fingerprints import fingerprint

        if self.partial or not self.digests:
            return ""
        return fingerprint(dict(self.digests))

    def require_kind(self, kinds: Collection[str]) -> None:
        """Raise WeightUpdateError unless the update is of one of these kinds."""
        if self.kind not in kinds:
            raise WeightUpdateError(
                f"this engine takes weights of kind {sorted(kinds)}, got kind={self.kind!r}"
            )

    def require_newer(self, served: int) -> None:
        """Raise WeightUpdateError unless the version is newer than the one that is served."""
        if self.version <= served:
            raise WeightUpdateError(
                f"version {self.version} is not newer than {served}, which is served"
            )


TAKING_WEIGHTS = "taking weights"
"""What an engine is doing (``Health.detail``) while requests wait for its new weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Health:
    """State of a backend.

    Attributes:
        ok: it can serve requests.
        detail: if not, why, and what to do; else what it is doing, if that is not serving.
        policy_version: version of the weights it serves.
        running: requests that sample.
        waiting: requests that wait for a slot.
        kv_used_share: used share of the KV cache, kept prefixes included, in [0, 1]; None if not
            reported.
    """

    ok: bool
    detail: str = ""
    policy_version: int = 0
    running: int = 0
    waiting: int = 0
    kv_used_share: float | None = None


def _counter(help: str, default: Any = 0) -> Any:
    """Return a field with its description for Prometheus."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendMetrics:
    """Counters since ``start``, each with its description; take differences for rates.

    The occupancy of the decode slots is ``(generated_tokens - accepted_tokens) / slot_steps``. A
    draft is of one request. ``recompilations`` are 0 in a healthy run, ``slot_steps`` where they
    are not counted.
    """

    generated_tokens: int = _counter("Ids sampled.")
    prefill_tokens: int = _counter("Prompt ids computed.")
    cached_tokens: int = _counter("Prompt ids reused from the prefix cache.")
    recomputed_tokens: int = _counter(
        "Ids in the prefix cache computed again, for want of a recurrent state."
    )
    requests_finished: int = _counter("Requests that ended, by any stop reason.")
    busy_seconds: float = _counter("Time the engine was computing.", 0.0)
    prefill_seconds: float = _counter("Part of busy_seconds spent on prompts.", 0.0)
    recompilations: int = _counter("Programs compiled since warm-up ended.")
    weight_update_seconds: float = _counter("Time spent taking weights.", 0.0)
    slot_steps: int = _counter("Slots of every decode step, idle ones included.")
    drafts: int = _counter("Drafts verified by speculative decoding.")
    draft_tokens: int = _counter("Drafted ids verified.")
    accepted_tokens: int = _counter("Drafted ids that were sampled.")
    offloaded_pages: int = _counter("Pages of the KV cache copied to host memory.")
    restored_pages: int = _counter("Pages of the KV cache copied back from host memory.")

    def since(self, earlier: BackendMetrics) -> BackendMetrics:
        """Return the differences to an earlier reading; ``recompilations`` stays the total."""
        differences = {}
        for name in self.__dataclass_fields__:
            if name != "recompilations":
                differences[name] = getattr(self, name) - getattr(earlier, name)
        return replace(self, **differences)


@dataclass(frozen=True, kw_only=True)
class BackendSpec:
    """Argument of the backend factory that an installed package registers.

    The factory returns the backend unstarted.

    Attributes:
        model: Hugging Face folder with the weights to serve first.
        max_model_len: longest context, in ids.
        max_concurrent: maximum requests at a time.
        version: policy version of the first weights.
        seed: seed of the requests that have none.
        decode_text: ids to text with special tokens, for stop strings; None without a tokenizer.
    """

    model: str
    max_model_len: int
    max_concurrent: int
    version: int = 0
    seed: int = 0
    decode_text: Callable[[Sequence[int]], str] | None = None


class IdentifiesWeights(Protocol):
    """A backend whose engine outlives a run, and knows which weights it serves.

    Attributes:
        weights_fingerprint: :attr:`WeightUpdate.fingerprint` of the last update; empty if the
            update had none.
    """

    weights_fingerprint: str


@runtime_checkable
class RolloutBackend(Protocol):
    """Interface of every engine. All methods may be called from one asyncio loop, concurrently."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def policy_version(self) -> int:
        """Version of the weights new tokens are sampled from."""
        ...

    async def start(self) -> None:
        """Load, warm up (compile every program it will use), and begin to serve."""
        ...

    async def generate(self, request: GenerateRequest) -> TokenOutput:
        """Run one request to its end.

        Cancelling the awaiting task frees the slot.

        Raises:
            PromptTooLongError: the prompt leaves no room for a sampled id.
            TokenDriftError: the engine would condition on other ids than ``prompt_ids``.
            BackendError: this request failed (``EngineDiedError``: the whole engine did).
            BackendClosedError: the backend was closed.
        """
        ...

    def stream(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Run one request like :meth:`generate`, and yield chunks as they are sampled.

        Closing the iterator frees the slot.
        """
        ...

    async def score(
        self, token_ids: Sequence[int], *, start: int = 1, top_k: int = 0
    ) -> TokenScores:
        """Return the log-probs of a context's ids from ``start`` on.

        They are of temperature 1 and of the whole vocabulary.

        Args:
            token_ids: the context; nothing is appended to it.
            start: the first id to score, at least 1: the one before predicts it.
            top_k: how many of the likeliest ids to report at each position; 0: none.

        Raises:
            BackendError: the context is too long, or its ids are not the model's.
        """
        ...

    async def abort(self, request_id: str) -> bool:
        """End a request now: it returns its ids so far with ``StopReason.ABORTED``.

        Returns:
            False if no such request runs.
        """
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling (see :class:`PauseMode`); new requests queue up until ``resume``.

        The latest mode holds: WAIT after KEEP lets frozen requests finish.
        """
        ...

    async def resume(self) -> None:
        """End the pause, also one whose caller was cancelled.

        A WAIT that has not returned fails, or returns first.
        """
        ...

    async def update_weights(self, update: WeightUpdate) -> None:
        """Take new weights, and reset the prefix cache.

        No token is ever sampled from a mix of versions.

        Raises:
            WeightUpdateError: refused (wrong names, shapes, version or kind); the old weights are
                still served. An engine that failed after they were overwritten says so, in
                ``health`` too, and serves nothing (``EngineDiedError``) until a whole update
                succeeds.
        """
        ...

    async def reset_prefix_cache(self) -> None: ...

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...

    async def health(self) -> Health: ...

    async def metrics(self) -> BackendMetrics: ...

    async def close(self) -> None:
        """End everything the backend started. Idempotent."""
        ...
