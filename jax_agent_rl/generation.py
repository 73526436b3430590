"""Data types of one generation, frozen and keyword-only.

Import them from :mod:`jax_agent_rl.types`. Two of them are what an engine reports of its draws so
that the learner can replay them, as compact bytes and text.

Router replay (Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and
Inference Routers", arXiv 2510.11370): engine and learner round differently, so that close router
scores may choose other experts. The learner therefore takes the engine's choices, and computes
their weights from its own scores.

Sampling replay: top-p, top-k, min-p and a grammar leave a part of the vocabulary, the *support* of
a draw. The learner scores the same one, so that both normalize over the same ids. A support has one
bit per id, and is text, as it travels in JSON: at most about V / 6 characters, in one of two
forms::

    "i" + base64(ids)          uint32, little-endian, ascending        few ids: a nucleus
    "m" + base64(zlib(mask))   uint32 [ceil(V / 32)], little-endian    nearly all: a grammar's mask
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

from jax_agent_rl.checks import check_bool, check_collection, check_finite, check_int, check_str

if TYPE_CHECKING:
    import numpy as np

ID_BOUND = 2**31
"""Exclusive bound of ids and counts: engines store them as int32."""
MAX_STOPS = 1024
MAX_STOP_LENGTH = 1024
"""Limits of stop strings and ids: all are looked for after each id."""
MAX_GRAMMAR_LENGTH = 1_000_000


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
        bytes_each = 2 if self.wide else 1
        size = math.prod(self.shape) * bytes_each
        if self.start < 0 or len(self.shape) != 3 or len(self.data) != size:
            raise ValueError(
                f"routed experts {self.shape} from {self.start} on take {size} bytes, not"
                f" {len(self.data)}"
            )

    @classmethod
    def of(cls, start: int, choices: Any) -> RoutedExperts:
        """Encode a numpy array of choices [n, L, k], unsigned integers of one byte or two."""
        n, layers, per_token = choices.shape
        wide = choices.dtype.itemsize > 1
        data = choices.astype("<u2" if wide else "u1").tobytes()
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
        positions, *layers_and_experts = self.shape
        count = min(max(end - self.start, 0), positions)
        bytes_each = len(self.data) // positions if positions else 0
        return replace(
            self,
            shape=(count, *layers_and_experts),
            data=self.data[: count * bytes_each],
        )


def routed_to_json(fields: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the fields of a :class:`RoutedExperts` with its bytes in base64."""
    if fields is None:
        return None
    return {**fields, "data": base64.b64encode(fields["data"]).decode()}


def routed_from_json(data: Mapping[str, Any] | None) -> RoutedExperts | None:
    """Invert :func:`routed_to_json`."""
    if data is None:
        return None
    fields = dict(data)
    fields["data"] = base64.b64decode(data["data"], validate=True)
    fields["shape"] = tuple(data["shape"])
    return RoutedExperts(**fields)


def join_routed(first: RoutedExperts | None, second: RoutedExperts | None) -> RoutedExperts | None:
    """Join the choices of two consecutive parts of a context.

    Where both have a position, ``first`` counts, as its ids were sampled with it. What is beyond a
    gap, or of another model, is left out.

    >>> a = RoutedExperts(start=0, shape=(2, 1, 1), data=bytes([5, 6]))
    >>> b = RoutedExperts(start=1, shape=(2, 1, 1), data=bytes([7, 8]))
    >>> joined = join_routed(a, b)
    >>> joined.start, joined.shape, list(joined.data)
    (0, (3, 1, 1), [5, 6, 8])
    """
    if first is None or second is None:
        return first or second

    same_model = first.shape[1:] == second.shape[1:] and first.wide == second.wide
    continues = second.start <= first.end < second.end
    if not same_model or not continues:
        return first

    bytes_each = len(second.data) // second.shape[0]
    overlap = (first.end - second.start) * bytes_each
    count = first.shape[0] + second.end - first.end
    return replace(
        first,
        shape=(count, *first.shape[1:]),
        data=first.data + second.data[overlap:],
    )


Support = str
"""The ids that one restricted draw was made from, encoded as above."""
_IDS = "i"
_MASK = "m"
_CACHE_SIZE = 512  # a grammar leaves the same ids again and again


def mask_words(vocab_size: int) -> int:
    """Return the number of 32-bit words of a mask of the vocabulary."""
    return -(-vocab_size // 32)


def encode_supports(masks: np.ndarray) -> list[Support]:
    """Encode masks, uint32 [S, ceil(V / 32)]."""
    return [_encode(mask.tobytes()) for mask in masks]


@functools.lru_cache(_CACHE_SIZE)
def _encode(mask: bytes) -> Support:
    import numpy as np

    words = np.frombuffer(mask, "<u4")
    nonzero_words = np.flatnonzero(words)
    if len(nonzero_words) < len(words) / 4:
        nonzero_bytes = words[nonzero_words].view(np.uint8)
        bits = np.unpackbits(nonzero_bytes, bitorder="little").reshape(-1, 32)
        row, bit = np.nonzero(bits)
        if len(row) < len(words) / 2:
            ids = nonzero_words[row] * 32 + bit
            return _IDS + base64.b64encode(ids.astype("<u4").tobytes()).decode()
    return _MASK + base64.b64encode(zlib.compress(mask, 1)).decode()


def decode_supports(supports: Sequence[Support | None], vocab_size: int) -> np.ndarray:
    """Decode supports to masks, uint32 [S, ceil(V / 32)]; None has all bits set.

    Raises:
        ValueError: a support is not one of this vocabulary.
    """
    import numpy as np

    num_words = mask_words(vocab_size)
    masks = np.full((len(supports), num_words), 0xFFFFFFFF, np.uint32)
    for mask, support in zip(masks, supports, strict=True):
        if support is None:
            continue
        try:
            kind = support[:1]
            data = base64.b64decode(support[1:], validate=True)
            if kind == _MASK:
                # Read exactly this size, however much a damaged or hostile one claims to hold.
                unpacked = zlib.decompressobj().decompress(data, 4 * num_words)
                mask[:] = np.frombuffer(unpacked, "<u4", num_words)
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
        self._check_stops()
        check_bool("ignore_eos", self.ignore_eos)
        self._check_grammar()

    def _check_stops(self) -> None:
        check_collection("stop", self.stop, of="strings")
        check_collection("stop_token_ids", self.stop_token_ids, of="ids")
        for name, values in (("stop", self.stop), ("stop_token_ids", self.stop_token_ids)):
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

        for token_id in self.stop_token_ids:
            check_int("stop token id", token_id, least=0, below=ID_BOUND)

    def _check_grammar(self) -> None:
        if self.grammar is None:
            return
        check_str("grammar", self.grammar)
        if len(self.grammar) > MAX_GRAMMAR_LENGTH:
            raise ValueError(
                f"a grammar has {len(self.grammar)} characters: it may have {MAX_GRAMMAR_LENGTH}"
            )
        if self.ignore_eos:
            raise ValueError(
                "ignore_eos=True: nothing may follow the EOS that ends a grammar; leave it out"
            )

    @property
    def truncated(self) -> bool:
        """Whether top-p, top-k or min-p leave only a part of the ids to draw from.

        Greedy draws are not truncated, whatever these say.
        """
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    @property
    def restricted(self) -> bool:
        """Whether draws are from a part of the ids.

        A backend with ``Capabilities.sampling_replay`` reports that part.
        """
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
        stop_match: the stop string (or the stop id, as text) that ended it, else None.
        context_digest: :func:`digest_ids` of the prompt plus ``token_ids`` as the engine saw them.
        cached_tokens: prompt ids whose KV was reused instead of computed.
        num_preempted: times the request lost its slot and was recomputed.
        constrained: for each id whether a grammar kept it from being sampled freely, so that it
            carries no loss; empty if none was, or if the supports say what it was sampled from.
        routed_experts: the choices at those positions of the context that were asked for and fed,
            see ``Capabilities.routed_experts``.
        supports: for each id the support of its draw, over which its log-prob is normalized; None:
            all ids. Empty if no draw was restricted, see ``Capabilities.sampling_replay``.
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
        num_ids = len(self.token_ids)
        num_log_probs = len(self.log_probs)
        num_versions = len(self.policy_versions)
        num_marks = len(self.constrained or self.token_ids)  # an empty field has no marks to count
        num_supports = len(self.supports or self.token_ids)
        if {num_log_probs, num_versions, num_marks, num_supports} != {num_ids}:
            raise ValueError(
                f"TokenOutput has {num_ids} ids, {num_log_probs} log-probs,"
                f" {num_versions} versions, {num_marks} grammar marks, {num_supports} supports"
            )

    @property
    def loss_mask(self) -> tuple[int, ...]:
        """1 for each id that carries loss: those sampled freely."""
        if not self.constrained:
            return (1,) * len(self.token_ids)
        return tuple(int(not mark) for mark in self.constrained)

    def then(self, resumption: TokenOutput) -> TokenOutput:
        """Return this (aborted) output joined with its resumption; each id keeps its version.

        >>> a = TokenOutput(token_ids=(5,), log_probs=(-1.0,), policy_versions=(1,),
        ...                 stop_reason=StopReason.ABORTED, context_digest="x")
        >>> b = TokenOutput(token_ids=(2,), log_probs=(-0.5,), policy_versions=(2,),
        ...                 stop_reason=StopReason.EOS, context_digest="y")
        >>> a.then(b).policy_versions
        (1, 2)
        """
        constrained: tuple[bool, ...] = ()
        if self.constrained or resumption.constrained:
            for part in (self, resumption):
                constrained += part.constrained or (False,) * len(part.token_ids)

        supports: tuple[Support | None, ...] = ()
        if self.supports or resumption.supports:
            for part in (self, resumption):
                supports += part.supports or (None,) * len(part.token_ids)

        return replace(
            resumption,
            token_ids=self.token_ids + resumption.token_ids,
            log_probs=self.log_probs + resumption.log_probs,
            policy_versions=self.policy_versions + resumption.policy_versions,
            cached_tokens=self.cached_tokens,
            num_preempted=self.num_preempted + resumption.num_preempted,
            constrained=constrained,
            routed_experts=join_routed(self.routed_experts, resumption.routed_experts),
            supports=supports,
        )

    def first(self, count: int, **changes: Any) -> TokenOutput:
        """Return the first ``count`` ids with their values.

        Its digest is empty, since this output's is of another context.

        Args:
            changes: other fields to replace.
        """
        routed_experts = self.routed_experts
        if routed_experts is not None:
            num_left_out = max(0, len(self.token_ids) - count)
            routed_experts = routed_experts.until(routed_experts.end - num_left_out)

        changes.setdefault("context_digest", "")
        return replace(
            self,
            token_ids=self.token_ids[:count],
            log_probs=self.log_probs[:count],
            policy_versions=self.policy_versions[:count],
            constrained=self.constrained[:count],
            routed_experts=routed_experts,
            supports=self.supports[:count],
            **changes,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenScores:
    """Log-probs of given ids under a model, at temperature 1 over the whole vocabulary.

    Attributes:
        log_probs: of each scored id.
        top_ids: for each scored id, the likeliest ids at its position, the likeliest first; empty
            unless asked for.
        top_log_probs: log-probs of the ``top_ids``.
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
