"""Data types of one generation, frozen and keyword-only; import them from :mod:`jax_agent_rl.types`.

Two of them are what an engine reports of its draws so that the learner can replay them, as compact
bytes and text.

Router replay (Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and
Inference Routers", arXiv 2510.11370): engine and learner round differently, so that close router
scores may choose other experts. The learner therefore takes the engine's choices, and computes
their weights from its own scores.

Sampling replay: top-p, top-k, min-p and a grammar leave a part of the vocabulary, the *support* of
a draw. The learner scores the same one, so that both normalize over the same ids. A support has one
bit per id, and is text, as it travels in JSON: at most about V / 6 characters, in one of two
forms::

    "i" + base64(ids)          uint32, little-endian, ascending        a nucleus: few ids
    "m" + base64(zlib(mask))   uint32 [ceil(V / 32)], little-endian    a grammar's mask: nearly all ids
"""

from __future__ import annotations

import base64
import functools
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from jax_agent_rl.validation import check_bool, check_collection, check_finite, check_int, check_str

if TYPE_CHECKING:
    import numpy as np

ID_BOUND = 2**31
"""Exclusive bound of ids and counts: engines store them as int32."""

MAX_STOPS = 1024
"""Most stop strings, and most stop ids: all are looked for after each id."""

MAX_STOP_LENGTH = 1024
"""Most characters of a stop string."""

MAX_GRAMMAR_LENGTH = 1_000_000
"""Most characters of a grammar."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutedExperts:
    """The chosen experts of n consecutive positions of a context.

    A position takes L x k bytes, or twice as many with more than 256 experts.

    Attributes:
        start: the first position.
        shape: n positions, L layers, k experts per token.
        data: their numbers in C order: uint8, or little-endian uint16 if ``wide``.
        wide: two bytes each.
    """

    start: int
    shape: tuple[int, int, int]
    data: bytes
    wide: bool = False

    def __post_init__(self) -> None:
        size = math.prod(self.shape) * (1 + self.wide)
        if self.start < 0 or len(self.shape) != 3 or len(self.data) != size:
            raise ValueError(
                f"routed experts {self.shape} from {self.start} on take {size} bytes, not"
                f" {len(self.data)}"
            )

    @classmethod
    def of(cls, start: int, chosen: Any) -> RoutedExperts:
        """Encode a numpy array of choices [n, L, k], unsigned integers of one byte or two."""
        n, layers, per_token = chosen.shape
        wide = chosen.dtype.itemsize > 1
        data = chosen.astype("<u2" if wide else "u1").tobytes()
        return cls(start=start, shape=(n, layers, per_token), data=data, wide=wide)

    @property
    def numbers(self) -> memoryview:
        """The choices, flat; ``np.reshape`` them to ``shape``."""
        return memoryview(self.data).cast("H" if self.wide else "B")

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.start + self.shape[0]

    def until(self, end: int) -> RoutedExperts:
        """Return the positions below ``end``."""
        count = min(max(end - self.start, 0), self.shape[0])
        bytes_each = len(self.data) // self.shape[0] if self.shape[0] else 0
        return replace(self, shape=(count, *self.shape[1:]), data=self.data[: count * bytes_each])


def routed_to_json(fields: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the fields of a :class:`RoutedExperts` with its bytes in base64."""
    return None if fields is None else {**fields, "data": base64.b64encode(fields["data"]).decode()}


def routed_from_json(data: Mapping[str, Any] | None) -> RoutedExperts | None:
    """Invert :func:`routed_to_json`."""
    if data is None:
        return None
    chosen = base64.b64decode(data["data"], validate=True)
    return RoutedExperts(**{**data, "shape": tuple(data["shape"]), "data": chosen})


def join_routed(first: RoutedExperts | None, rest: RoutedExperts | None) -> RoutedExperts | None:
    """Join choices of one context; where both have a position, ``first`` counts, as its ids were sampled with it.

    What lies beyond a gap, or is of another model, is left out.

    >>> a = RoutedExperts(start=0, shape=(2, 1, 1), data=bytes([5, 6]))
    >>> b = RoutedExperts(start=1, shape=(2, 1, 1), data=bytes([7, 8]))
    >>> joined = join_routed(a, b)
    >>> joined.start, joined.shape, list(joined.data)
    (0, (3, 1, 1), [5, 6, 8])
    """
    if first is None or rest is None:
        return first or rest
    same = first.shape[1:] == rest.shape[1:] and first.wide == rest.wide
    if not same or not rest.start <= first.end < rest.end:
        return first
    skipped = (first.end - rest.start) * (len(rest.data) // rest.shape[0])
    count = first.shape[0] + rest.end - first.end
    return replace(first, shape=(count, *first.shape[1:]), data=first.data + rest.data[skipped:])


Support = str
"""The ids that one restricted draw was made from, encoded as above."""
_IDS, _MASK = "i", "m"
_CACHED = 512  # a grammar leaves the same ids again and again


def mask_words(vocab_size: int) -> int:
    """Return the number of 32-bit words of a mask of the vocabulary."""
    return -(-vocab_size // 32)


def encode_supports(masks: np.ndarray) -> list[Support]:
    """Encode masks, uint32 [S, ceil(V / 32)]."""
    return [_encode(mask.tobytes()) for mask in masks]


@functools.lru_cache(_CACHED)
def _encode(mask: bytes) -> Support:
    import numpy as np

    words = np.frombuffer(mask, "<u4")
    used = np.flatnonzero(words)
    if len(used) < len(words) / 4:
        bits = np.unpackbits(words[used].view(np.uint8), bitorder="little").reshape(-1, 32)
        which, bit = np.nonzero(bits)
        if len(which) < len(words) / 2:
            return (
                _IDS + base64.b64encode((used[which] * 32 + bit).astype("<u4").tobytes()).decode()
            )
    return _MASK + base64.b64encode(zlib.compress(mask, 1)).decode()


def decode_supports(supports: Sequence[Support | None], vocab_size: int) -> np.ndarray:
    """Decode supports to masks, uint32 [S, ceil(V / 32)]; None has all bits set.

    Raises:
        ValueError: a support is not one of this vocabulary.
    """
    import numpy as np

    words = mask_words(vocab_size)
    masks = np.full((len(supports), words), 0xFFFFFFFF, np.uint32)
    for mask, support in zip(masks, supports, strict=True):
        if support is None:
            continue
        try:
            kind, data = support[:1], base64.b64decode(support[1:], validate=True)
            if (
                kind == _MASK
            ):  # of exactly this size, however much a damaged or hostile one claims to hold
                mask[:] = np.frombuffer(
                    zlib.decompressobj().decompress(data, 4 * words), "<u4", words
                )
            elif kind == _IDS and data:
                ids = np.frombuffer(data, "<u4")
                mask[:] = 0
                np.bitwise_or.at(mask, ids >> 5, np.uint32(1) << (ids & 31))
            else:
                raise ValueError("it is of no known form")
        except (ValueError, IndexError, zlib.error) as error:
            raise ValueError(
                f"not a support of a vocabulary of {vocab_size} ids: {support[:16]!r} ({error})"
            ) from None
    return masks


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Parameters of one generation.

    Attributes:
        max_tokens: maximum ids to sample, >= 1.
        temperature: finite; 0 is greedy (log-probs are then those of temperature 1).
        top_p: nucleus mass in (0, 1]; 1 is off.
        top_k: keep the k most likely ids; 0 is off. Ties at the threshold are all kept.
        min_p: keep the ids at least ``min_p`` times as likely as the most likely one; in [0, 1], 0
            is off. It comes before top-k, and that before top-p, as in vLLM.
        seed: fixes this request's randomness, independent of what else is in the batch. None draws
            one.
        stop: end when one of these strings appears in the decoded output. The ids up to and
            including the one that completes it are kept.
        stop_token_ids: end when one of these ids is sampled (kept), besides the model's EOS ids.
        ignore_eos: whether to continue past EOS (benchmarks).
        grammar: None, or what the output must be up to its EOS, in llguidance's dialect of Lark;
            only with ``Capabilities.grammars``. Ids that would break it have no probability; min-p,
            top-k and top-p come after that.

    Raises:
        ValueError: a value is of another type, or out of range.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: str | None = None

    def __post_init__(self) -> None:
        check_int("max_tokens", self.max_tokens, least=1)
        check_finite("temperature", self.temperature)
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature}: must be >= 0 (0 is greedy)")
        check_finite("top_p", self.top_p)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: must be in (0, 1]")
        check_int("top_k", self.top_k, below=ID_BOUND)
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k}: must be >= 0 (0 is off)")
        check_finite("min_p", self.min_p)
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p}: must be in [0, 1] (0 is off)")
        if self.seed is not None:
            check_int("seed", self.seed, least=-(2**63), below=2**64)
        for name, values in (("stop", self.stop), ("stop_token_ids", self.stop_token_ids)):
            check_collection(name, values, of="strings" if name == "stop" else "ids")
            if len(values) > MAX_STOPS:
                raise ValueError(f"{name} has {len(values)} entries: there may be {MAX_STOPS}")
        for text in self.stop:
            check_str("stop string", text)
            if len(text) > MAX_STOP_LENGTH:
                raise ValueError(
                    f"a stop string has {len(text)} characters: it may have {MAX_STOP_LENGTH}"
                )
        if not all(self.stop):
            raise ValueError(
                "stop contains an empty string, which would end every generation at once"
            )
        for token in self.stop_token_ids:
            check_int("stop token id", token, least=0, below=ID_BOUND)
        check_bool("ignore_eos", self.ignore_eos)
        if self.grammar is not None:
            check_str("grammar", self.grammar)
            if len(self.grammar) > MAX_GRAMMAR_LENGTH:
                raise ValueError(
                    f"a grammar has {len(self.grammar)} characters: it may have"
                    f" {MAX_GRAMMAR_LENGTH}"
                )
            if self.ignore_eos:
                raise ValueError(
                    "ignore_eos=True: nothing may follow the EOS that ends a grammar; leave it out"
                )

    @property
    def truncated(self) -> bool:
        """Whether top-p, top-k or min-p leave only a part of the ids to draw from; greedy draws have none of them."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    @property
    def restricted(self) -> bool:
        """Whether draws are from a part of the ids, which a backend with ``Capabilities.sampling_replay`` reports."""
        return self.truncated or self.grammar is not None


class StopReason(StrEnum):
    """Why one *generation* ended."""

    EOS = "eos"
    """The model's end-of-sequence id was sampled. It is the last id of the output, with its
    log-prob."""
    STOP = "stop"
    """A stop string or an extra stop token id was produced; ``TokenOutput.stop_match`` says which.
    """
    LENGTH = "length"
    """``max_tokens`` ids were sampled, or the model's context is full."""
    ABORTED = "aborted"
    """Cancelled from outside. The ids so far are valid and the generation can be resumed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenOutput:
    """Result of one generation: ids, never text.

    Attributes:
        token_ids: sampled ids, the stop token included.
        log_probs: natural-log probability of each id under the distribution it was sampled from.
        policy_versions: version of the weights that produced each id.
        stop_reason: why it ended.
        stop_match: the stop string (or the stop id, as text) that ended it, else None.
        context_digest: :func:`digest_ids` of the prompt plus ``token_ids`` as the engine saw them.
        cached_tokens: prompt ids whose KV was reused instead of computed.
        num_preempted: times the request lost its slot and was recomputed.
        constrained: for each id whether a grammar kept it from being sampled freely, so that it
            carries no loss; empty if none was, or if the supports say what it was sampled from.
        routed_experts: of the context's positions that were asked for and fed, see
            ``Capabilities.routed_experts``.
        supports: for each id the support of its draw, over which its log-prob is normalized; None:
            all ids. Empty if none was restricted, see ``Capabilities.sampling_replay``.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    policy_versions: tuple[int, ...]
    stop_reason: StopReason
    stop_match: str | None = None
    context_digest: str
    cached_tokens: int = 0
    num_preempted: int = 0
    constrained: tuple[bool, ...] = ()
    routed_experts: RoutedExperts | None = None
    supports: tuple[Support | None, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        values = (
            self.log_probs,
            self.policy_versions,
            self.constrained or self.token_ids,
            self.supports or self.token_ids,
        )
        if any(len(of_ids) != n for of_ids in values):
            counts = "{} log-probs, {} versions, {} grammar marks, {} supports".format(
                *map(len, values)
            )
            raise ValueError(f"TokenOutput has {n} ids, {counts}")

    @property
    def loss_mask(self) -> tuple[int, ...]:
        """1 for each id that carries loss: those sampled freely."""
        return tuple(int(not mark) for mark in self.constrained) or (1,) * len(self.token_ids)

    def then(self, rest: TokenOutput) -> TokenOutput:
        """Return this (aborted) output joined with its resumption, per-token versions kept.

        >>> a = TokenOutput(token_ids=(5,), log_probs=(-1.0,), policy_versions=(1,),
        ...                 stop_reason=StopReason.ABORTED, context_digest="x")
        >>> b = TokenOutput(token_ids=(2,), log_probs=(-0.5,), policy_versions=(2,),
        ...                 stop_reason=StopReason.EOS, context_digest="y")
        >>> a.then(b).policy_versions
        (1, 2)
        """
        parts = (self, rest)
        marks = [part.constrained or (False,) * len(part.token_ids) for part in parts]
        supports = [part.supports or (None,) * len(part.token_ids) for part in parts]
        return replace(
            rest,
            token_ids=self.token_ids + rest.token_ids,
            log_probs=self.log_probs + rest.log_probs,
            policy_versions=self.policy_versions + rest.policy_versions,
            cached_tokens=self.cached_tokens,
            num_preempted=self.num_preempted + rest.num_preempted,
            constrained=sum(marks, ()) if self.constrained or rest.constrained else (),
            routed_experts=join_routed(self.routed_experts, rest.routed_experts),
            supports=sum(supports, ()) if self.supports or rest.supports else (),
        )

    def first(self, count: int, **changes: Any) -> TokenOutput:
        """Return the first ``count`` ids with their values, and ``changes`` of other fields; the digest is void."""
        routed = self.routed_experts
        return replace(
            self,
            token_ids=self.token_ids[:count],
            log_probs=self.log_probs[:count],
            policy_versions=self.policy_versions[:count],
            constrained=self.constrained[:count],
            routed_experts=routed
            and routed.until(routed.end - max(0, len(self.token_ids) - count)),
            supports=self.supports[:count],
            **{"context_digest": "", **changes},
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenScores:
    """Log-probs of given ids under a model, at temperature 1 over the whole vocabulary.

    Attributes:
        log_probs: of each scored id.
        top_ids: for each, the likeliest ids at its position, the likeliest first; empty unless
            asked for.
        top_log_probs: theirs.
    """

    log_probs: tuple[float, ...]
    top_ids: tuple[tuple[int, ...], ...] = ()
    top_log_probs: tuple[tuple[float, ...], ...] = ()


class PauseMode(StrEnum):
    """What :meth:`RolloutBackend.pause` does with requests that are running."""

    KEEP = "keep"
    """Freeze them; they continue after ``resume`` (possibly under new weights)."""
    WAIT = "wait"
    """Let them finish, admit no new ones, return when the engine is idle."""
    ABORT = "abort"
    """End them now with ``StopReason.ABORTED``; the caller resumes them."""
