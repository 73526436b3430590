"""The subject of a diagnosis: a few contexts, and the learner's model to score them under any setting."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_agent_rl.agreement import forward
from jax_agent_rl.config import Config
from jax_agent_rl.learner.learner import Learner
from jax_agent_rl.learner.metrics import Comparison, comparable
from jax_agent_rl.learner.parameterization import compute_params
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.hf import load_hf
from jax_agent_rl.types import Group, Support, Trajectory, digest_ids

MAX_CONTEXT_LEN = 1024
"""Ids that are examined of a context; what comes later is left out."""
MAX_CONTEXTS = 64
"""Contexts that are kept of a breach, or compared of a run folder."""
MAX_INSERTED = 128
"""Ids that a hypothesis may insert into a context."""
ROWS = 4
"""Contexts of one pass."""

Scores = list[np.ndarray]
"""For each context the log-probs of its compared tokens, float64 [S]."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """One sequence of a trajectory.

    Attributes:
        name: of its trajectory.
        token_ids: prompt and response.
        prompt: ids before the first sampled one.
        at: int [S], indices of the compared tokens in ``token_ids``.
        rollout: float64 [S], the engine's log-probs of them.
        learner: float64 [S], the learner's own, where it scored them.
        drifted: turns of which the engine reported another context than is trained on.
        supports: of the compared tokens' draws, S of them; empty if none was restricted.
    """

    name: str
    token_ids: tuple[int, ...]
    prompt: int
    at: np.ndarray
    rollout: np.ndarray
    learner: np.ndarray | None = None
    drifted: int = 0
    supports: tuple[Support | None, ...] = ()

    def cut(self, length: int) -> Context:
        """Return the first ``length`` ids; later ones have no effect on them."""
        kept = self.at < length
        return replace(
            self,
            token_ids=self.token_ids[:length],
            at=self.at[kept],
            rollout=self.rollout[kept],
            learner=None if self.learner is None else self.learner[kept],
            supports=self.supports[: kept.sum()],  # tokens are in order
        )

    def to_json(self) -> dict[str, Any]:
        return {name: x.tolist() if isinstance(x, np.ndarray) else x for name, x in vars(self).items()}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Context:
        """Invert :meth:`to_json`."""
        learner = None if saved["learner"] is None else np.asarray(saved["learner"], np.float64)
        arrays = {"at": np.asarray(saved["at"], np.int64), "rollout": np.asarray(saved["rollout"], np.float64)}
        tuples = {"token_ids": tuple(saved["token_ids"]), "supports": tuple(saved.get("supports", ()))}
        return cls(**{**saved, **arrays, **tuples, "learner": learner})


def collect_contexts(groups: Sequence[Group], since: int, learner: Sequence[np.ndarray] | None = None) -> list[Context]:
    """Return every text context with comparable tokens, cut to ``MAX_CONTEXT_LEN`` ids.

    Args:
        groups: with their trajectories.
        since: first policy version of the parameters compared with.
        learner: for each trajectory the learner's log-probs of its tokens with loss, float64 [S].
    """
    contexts = []
    for i, trajectory in enumerate(t for group in groups for t in group.trajectories):
        contexts += _trajectory_contexts(trajectory, since, None if learner is None else learner[i])
    return [cut for context in contexts if len((cut := context.cut(MAX_CONTEXT_LEN)).at)]


def _trajectory_contexts(trajectory: Trajectory, since: int, learner: np.ndarray | None) -> Iterator[Context]:
    begin = 0
    for sequence in trajectory.sequences:
        with_loss = np.flatnonzero(sequence.loss_mask)
        mine = comparable(replace(sequence, history_window=None, segments=()), since)
        own = None if learner is None else learner[begin : begin + len(with_loss)][mine]
        begin += len(with_loss)
        if sequence.multi_modal:
            continue
        at, drawn_from = with_loss[mine], sequence.supports
        yield Context(
            name=sequence.trajectory_id,
            token_ids=(*sequence.prompt_ids, *sequence.response_ids),
            prompt=len(sequence.prompt_ids) + int(np.argmax(sequence.response_mask)),
            at=len(sequence.prompt_ids) + at,
            rollout=np.asarray(sequence.rollout_logprobs, np.float64)[at],
            learner=own,
            drifted=_count_drifted(sequence),
            supports=tuple(drawn_from[i] for i in at) if sequence.restricted else (),
        )


def _count_drifted(sequence: Trajectory) -> int:
    """Count turns whose context in the engine is not the one trained on; 0 if the engine reports none."""
    context, drifted = sequence.prompt_ids, 0
    for turn in sequence.turns:
        context += turn.output.token_ids
        reported = turn.output.context_digest
        drifted += bool(reported) and reported != digest_ids(context)
        context += turn.appended_ids
    return drifted


@dataclass(frozen=True, kw_only=True)
class Row:
    """A context as it is given to the model: with more ids, other positions, or a prefix of other weights.

    Attributes:
        token_ids: int [T].
        at: int [S], indices of the compared tokens.
        positions: int [T].
        stale: ids at the beginning whose keys and values are of other weights.
    """

    token_ids: np.ndarray
    at: np.ndarray
    positions: np.ndarray
    stale: int = 0

    def insert(self, index: int, ids: Sequence[int], *, shift_positions: bool = True) -> Row:
        """Insert ids before ``index``.

        Args:
            index: in ``token_ids``.
            ids: to insert.
            shift_positions: whether later ids have higher positions for it.
        """
        after = np.arange(len(self.token_ids)) >= index
        positions = self.positions + len(ids) * (after & shift_positions)
        inserted = (self.positions[index] if index < len(after) else len(after)) + np.arange(len(ids))
        return replace(
            self,
            token_ids=np.insert(self.token_ids, index, ids),
            positions=np.insert(positions, index, inserted).astype(np.int32),
            at=self.at + len(ids) * (self.at >= index),
        )


@dataclass(frozen=True, kw_only=True)
class DiagnosisSubject:
    """A few contexts, and the learner's model to score them.

    Attributes:
        model: as the learner runs it.
        params: the learner's, whole.
        dtype: of the learner's products.
        temperature: the rollout's.
        contexts: to score.
        older: makes parameters of other versions, by description.
        pad_ids: ids used as padding.
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
        ids = [np.asarray(context.token_ids, np.int32) for context in self.contexts]
        both = zip(self.contexts, ids, strict=True)
        return [Row(token_ids=x, at=c.at, positions=np.arange(len(x), dtype=np.int32)) for c, x in both]

    @property
    def ids(self) -> list[np.ndarray]:
        """The compared tokens' ids, int [S] per context."""
        return [np.asarray(c.token_ids)[c.at] for c in self.contexts]

    @property
    def supports(self) -> list[Support | None]:
        """The supports of all compared tokens' draws; empty if none was restricted."""
        supports = [support for c in self.contexts for support in c.supports or (None,) * len(c.at)]
        return supports if any(supports) else []

    def score(
        self,
        rows: Sequence[Row] | None = None,
        *,
        model: DecoderConfig | None = None,
        params: Params | None = None,
        dtype: str | None = None,
        prefix: Params | None = None,
    ) -> Scores:
        """Score the compared tokens under changed settings.

        Args:
            rows: changed contexts.
            model: other hyperparameters.
            params: other weights.
            dtype: of products.
            prefix: weights of the rows' stale ids.
        """
        weights = compute_params(self.params if params is None else params, dtype or self.dtype)
        hidden = self.hidden(rows, model=model, params=weights, prefix=prefix)
        read = forward.logprobs(weights, hidden, np.concatenate(self.ids), (self.temperature,), self.supports)[0]
        return self.split(read)

    def hidden(
        self,
        rows: Sequence[Row] | None = None,
        *,
        model: DecoderConfig | None = None,
        params: Params | None = None,
        prefix: Params | None = None,
    ) -> jax.Array:
        """Return the hidden states [S, D] before the compared tokens of all contexts; arguments as :meth:`score`."""
        rows, model = self.rows if rows is None else rows, model or self.model
        weights = compute_params(self.params, self.dtype) if params is None else params
        older = None if prefix is None else compute_params(prefix, self.dtype)
        hidden = []
        for begin in range(0, len(rows), ROWS):
            batch = rows[begin : begin + ROWS]
            inputs = self.inputs(batch)
            old = None if older is None else forward.activations(model, older, inputs)
            states = forward.hidden_states(model, weights, inputs, old)
            hidden += [states[i, jnp.asarray(row.at - 1)] for i, row in enumerate(batch)]
        return jnp.concatenate(hidden)

    def inputs(self, rows: Sequence[Row]) -> forward.Inputs:
        """Pad rows to one shape, whatever was inserted: few programs are compiled."""
        length = max(len(c.token_ids) for c in self.contexts) + MAX_INSERTED
        shape = min(ROWS, len(self.contexts)), -(-length // 128) * 128
        ids, positions = np.zeros(shape, np.int32), np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1))
        fresh = np.ones(shape, bool)
        for i, row in enumerate(rows):
            count = len(row.token_ids)
            ids[i, :count], positions[i, :count], fresh[i, : row.stale] = row.token_ids, row.positions, False
        return forward.Inputs(token_ids=ids, positions=positions, fresh=fresh)

    def split(self, values: np.ndarray) -> Scores:
        """Split numbers of all compared tokens by context."""
        return np.split(values, np.cumsum([len(c.at) for c in self.contexts])[:-1])

    def gaps(self, scores: Scores) -> Scores:
        """Return the engine's log-probs minus these."""
        return [c.rollout - own for c, own in zip(self.contexts, scores, strict=True)]

    def compare(self, scores: Scores) -> Comparison:
        """Compare the engine's log-probs with these."""
        return Comparison.of(np.concatenate(self.gaps(scores)))


def make_subject(learner: Learner, config: Config, contexts: Sequence[Context], *, version: int) -> DiagnosisSubject:
    """Return the subject of a run: contexts, the learner's parameters, and older ones.

    Args:
        learner: with the parameters of ``version``.
        config: of the run.
        contexts: to score.
        version: policy version that the contexts were sampled from.
    """
    params = learner.params
    older: dict[str, Callable[[], Params]] = {}
    if (before := learner.params_before()) is not None:
        older["the version before (the last optimizer update undone)"] = lambda: before
    if version:
        shardings = jax.tree.map(lambda x: x.sharding, params)
        older["version 0 (the model's files)"] = lambda: load_hf(config.model.path, shardings=shardings)[1]
    return DiagnosisSubject(
        model=learner.model,
        params=params,
        dtype=config.learner.compute_dtype,
        temperature=config.rollout.temperature,
        contexts=contexts,
        older=older,
    )
