"""The parameters of a generation."""

from __future__ import annotations

from dataclasses import dataclass

from jax_agent_rl.checks import check_bool, check_collection, check_finite, check_int, check_str
from jax_agent_rl.types.token_ids import ID_BOUND

MAX_STOPS = 1024
"""Most stop strings, and most stop ids: all are looked for after each id."""
MAX_STOP_LENGTH = 1024
"""Most characters of a stop string."""
MAX_GRAMMAR_LENGTH = 1_000_000
"""Most characters of a grammar."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Parameters of one generation.

    Attributes:
        max_tokens: maximum ids to sample, >= 1.
        temperature: finite; 0 is greedy (log-probs are then of temperature 1).
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
