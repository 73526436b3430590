"""Parameters of one generation; import them from :mod:`jax_agent_rl.types`."""

from __future__ import annotations

from dataclasses import dataclass

from jax_agent_rl.validation import check_bool, check_collection, check_finite, check_int, check_str

ID_BOUND = 2**31
"""Exclusive bound of ids and counts: engines store them as int32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Parameters of one generation.

    Attributes:
        max_tokens: maximum ids to sample, >= 1.
        temperature: finite; 0 is greedy (log-probs are then those of temperature 1).
        top_p: nucleus mass in (0, 1]; 1 is off.
        top_k: keep the k most likely ids; 0 is off. Ties at the threshold are all kept.
        min_p: keep the ids at least ``min_p`` times as likely as the most likely one; in [0, 1], 0 is off. It comes
            before top-k, and that before top-p, as in vLLM.
        seed: fixes this request's randomness, independent of what else is in the batch. None draws one.
        stop: end when one of these strings appears in the decoded output. The ids up to and including the
            one that completes it are kept.
        stop_token_ids: end when one of these ids is sampled (kept), besides the model's EOS ids.
        ignore_eos: whether to continue past EOS (benchmarks).
        grammar: None, or what the output must be up to its EOS, in llguidance's dialect of Lark; only with
            ``Capabilities.grammars``. Ids that would break it have no probability; min-p, top-k and top-p
            come after that.

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
            check_int("seed", self.seed)
        check_collection("stop", self.stop, of="strings")
        for text in self.stop:
            check_str("stop string", text)
        if not all(self.stop):
            raise ValueError("stop contains an empty string, which would end every generation at once")
        check_collection("stop_token_ids", self.stop_token_ids, of="ids")
        for token in self.stop_token_ids:
            check_int("stop token id", token, least=0, below=ID_BOUND)
        check_bool("ignore_eos", self.ignore_eos)
        if self.grammar is not None:
            check_str("grammar", self.grammar)
            if self.ignore_eos:
                raise ValueError("ignore_eos=True: nothing may follow the EOS that ends a grammar; leave it out")

    @property
    def truncated(self) -> bool:
        """Whether top-p, top-k or min-p leave only a part of the ids to draw from; greedy draws have none of them."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    @property
    def restricted(self) -> bool:
        """Whether draws are from a part of the ids, which a backend with ``Capabilities.sampling_replay`` reports."""
        return self.truncated or self.grammar is not None
