"""What a diagnosis is about: a few contexts, and a model that can be asked what it would make of them, if."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np

from jax_agent_rl.agreement import forward
from jax_agent_rl.agreement.contexts import Context
from jax_agent_rl.learner.comparison import Comparison
from jax_agent_rl.learner.precision import compute_params
from jax_agent_rl.models.config import DecoderConfig, Params

ROOM = 128
"""Ids that may be put into a context to try something."""
ROWS = 4
"""Contexts of one pass."""

Scores = list[np.ndarray]
"""For each context the log-probs of its compared tokens, float64 [S]."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A context as it is given to the model: with more ids, other positions, or a prefix of other weights.

    Attributes:
        token_ids: int [T].
        at: int [S], places of the compared tokens.
        positions: int [T].
        stale: ids at the beginning whose keys and values are of other weights.
    """

    token_ids: np.ndarray
    at: np.ndarray
    positions: np.ndarray
    stale: int = 0

    @classmethod
    def of(cls, context: Context) -> Row:
        ids = np.asarray(context.token_ids, np.int32)
        return cls(token_ids=ids, at=context.at, positions=np.arange(len(ids), dtype=np.int32))

    def with_ids(self, place: int, ids: Sequence[int], *, counted: bool = True) -> Row:
        """With ids put in before ``place``; ``counted``: the positions of what follows move on."""
        after = np.arange(len(self.token_ids)) >= place
        moved = self.positions + len(ids) * (after & counted)
        between = (self.positions[place] if place < len(after) else len(after)) + np.arange(len(ids))
        return replace(
            self,
            token_ids=np.insert(self.token_ids, place, ids),
            positions=np.insert(moved, place, between).astype(np.int32),
            at=self.at + len(ids) * (self.at >= place),
        )


@dataclass(frozen=True, kw_only=True)
class DiagnosisSubject:
    """See the module's docstring.

    Attributes:
        model: as the learner runs it.
        params: the learner's, whole.
        dtype: of the learner's products.
        temperature: the rollout's.
        contexts: to look at.
        older: what parameters of other versions there are, by what to call them; each is made when it is asked for.
        pad_ids: ids that stand for nothing.
    """

    model: DecoderConfig
    params: Params
    dtype: str
    temperature: float
    contexts: Sequence[Context]
    older: Mapping[str, Callable[[], Params]] = field(default_factory=dict)
    pad_ids: Sequence[int] = (0,)

    @property
    def rows(self) -> list[Row]:
        """The contexts as they are."""
        return [Row.of(context) for context in self.contexts]

    @property
    def ids(self) -> list[np.ndarray]:
        """The compared tokens' ids, int [S] per context."""
        return [np.asarray(c.token_ids)[c.at] for c in self.contexts]

    def score(
        self,
        rows: Sequence[Row] | None = None,
        *,
        model: DecoderConfig | None = None,
        params: Params | None = None,
        dtype: str | None = None,
        prefix: Params | None = None,
    ) -> Scores:
        """Log-probs of the compared tokens, if.

        Args:
            rows: the contexts, changed.
            model: other settings.
            params: other weights.
            dtype: of products.
            prefix: weights that the rows' stale ids were computed by.
        """
        weights = compute_params(self.params if params is None else params, dtype or self.dtype)
        hidden = self.hidden(rows, model=model, params=weights, prefix=prefix)
        read = forward.logprobs(weights, hidden, np.concatenate(self.ids), (self.temperature,))[0]
        return self.split(read)

    def hidden(
        self,
        rows: Sequence[Row] | None = None,
        *,
        model: DecoderConfig | None = None,
        params: Params | None = None,
        prefix: Params | None = None,
    ) -> jax.Array:
        """Hidden states [S, D] that the compared tokens of all contexts are read from; as :meth:`score`."""
        rows, model = self.rows if rows is None else rows, model or self.model
        weights = compute_params(self.params, self.dtype) if params is None else params
        found = []
        for begin in range(0, len(rows), ROWS):
            some = rows[begin : begin + ROWS]
            inputs = self.inputs(some)
            old = None
            if prefix is not None:
                before = forward.activations(model, compute_params(prefix, self.dtype), inputs)
                old = before.keys, before.values
            states = forward.hidden_states(model, weights, inputs, old)
            found += [states[i, jnp.asarray(row.at - 1)] for i, row in enumerate(some)]
        return jnp.concatenate(found)

    def inputs(self, rows: Sequence[Row]) -> forward.Inputs:
        """Rows of one shape, whatever is put into them: few programs are compiled."""
        longest = max(len(c.token_ids) for c in self.contexts) + ROOM
        shape = min(ROWS, len(self.contexts)), -(-longest // 128) * 128
        ids, positions = np.zeros(shape, np.int32), np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1))
        fresh = np.ones(shape, bool)
        for i, row in enumerate(rows):
            count = len(row.token_ids)
            ids[i, :count], positions[i, :count], fresh[i, : row.stale] = row.token_ids, row.positions, False
        return forward.Inputs(token_ids=ids, positions=positions, fresh=fresh)

    def split(self, values: np.ndarray) -> Scores:
        """Numbers of all compared tokens, by context."""
        return np.split(values, np.cumsum([len(c.at) for c in self.contexts])[:-1])

    def gaps(self, scores: Scores) -> Scores:
        """The engine's log-probs minus these."""
        return [c.rollout - own for c, own in zip(self.contexts, scores, strict=True)]

    def compare(self, scores: Scores) -> Comparison:
        """How far the engine's log-probs are from these."""
        return Comparison.of(np.concatenate(self.gaps(scores)))
