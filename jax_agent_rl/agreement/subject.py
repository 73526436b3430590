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
from jax_agent_rl.learner.comparison import Comparison, comparable
from jax_agent_rl.learner.learner import Learner
from jax_agent_rl.learner.parameterization import compute_params
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.hf import load_hf
from jax_agent_rl.types import Group, Trajectory, digest_ids

LONGEST = 1024
"""Ids that are looked at of a context; what comes later is left out."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """One sequence of a trajectory.

    Attributes:
        name: of its trajectory.
        token_ids: prompt and response.
        prompt: ids before the first sampled one.
        at: int [S], places of the compared tokens in ``token_ids``.
        rollout: float64 [S], the engine's log-probs of them.
        learner: float64 [S], the learner's own, where it scored them.
        drifted: turns of which the engine reported another context than is trained on.
    """

    name: str
    token_ids: tuple[int, ...]
    prompt: int
    at: np.ndarray
    rollout: np.ndarray
    learner: np.ndarray | None = None
    drifted: int = 0

    def cut(self, longest: int) -> Context:
        """Return the first ``longest`` ids; later ones have no effect on them."""
        kept = self.at < longest
        return replace(
            self,
            token_ids=self.token_ids[:longest],
            at=self.at[kept],
            rollout=self.rollout[kept],
            learner=None if self.learner is None else self.learner[kept],
        )

    def to_json(self) -> dict[str, Any]:
        arrays = {"at": self.at.tolist(), "rollout": self.rollout.tolist()}
        learner = None if self.learner is None else self.learner.tolist()
        ids = {"name": self.name, "token_ids": list(self.token_ids), "prompt": self.prompt, "drifted": self.drifted}
        return ids | arrays | {"learner": learner}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Context:
        """Invert :meth:`to_json`."""
        learner = None if saved["learner"] is None else np.asarray(saved["learner"], np.float64)
        return cls(
            name=saved["name"],
            token_ids=tuple(saved["token_ids"]),
            prompt=saved["prompt"],
            at=np.asarray(saved["at"], np.int64),
            rollout=np.asarray(saved["rollout"], np.float64),
            learner=learner,
            drifted=saved["drifted"],
        )


def contexts_of(
    groups: Sequence[Group], since: int, learner: Sequence[np.ndarray] | None = None, *, longest: int = LONGEST
) -> list[Context]:
    """Return every text context with comparable tokens.

    Args:
        groups: with their trajectories.
        since: first policy version of the parameters compared with.
        learner: for each trajectory the learner's log-probs of its tokens with loss, float64 [S].
        longest: ids that are kept of each.
    """
    found = []
    for i, trajectory in enumerate(t for group in groups for t in group.trajectories):
        own = None if learner is None else learner[i]
        found += [context.cut(longest) for context in _of_trajectory(trajectory, since, own)]
    return [context for context in found if len(context.at)]


def _of_trajectory(trajectory: Trajectory, since: int, learner: np.ndarray | None) -> Iterator[Context]:
    begin = 0
    for sequence in trajectory.sequences:
        with_loss = np.flatnonzero(sequence.loss_mask)
        mine = comparable(replace(sequence, history_window=None, segments=()), since)
        own = None if learner is None else learner[begin : begin + len(with_loss)][mine]
        begin += len(with_loss)
        if sequence.multi_modal:
            continue
        at = with_loss[mine]
        yield Context(
            name=sequence.trajectory_id,
            token_ids=(*sequence.prompt_ids, *sequence.response_ids),
            prompt=len(sequence.prompt_ids) + int(np.argmax(sequence.response_mask)),
            at=len(sequence.prompt_ids) + at,
            rollout=np.asarray(sequence.rollout_logprobs, np.float64)[at],
            learner=own,
            drifted=_drifted(sequence),
        )


def _drifted(sequence: Trajectory) -> int:
    """Count turns whose context in the engine is not the one trained on; 0 if the engine reports none."""
    context, drifted = sequence.prompt_ids, 0
    for turn in sequence.turns:
        context += turn.output.token_ids
        reported = turn.output.context_digest
        drifted += bool(reported) and reported != digest_ids(context)
        context += turn.appended_ids
    return drifted


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
        """Insert ids before ``place``; with ``counted``, later positions move on."""
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
    """A few contexts, and the learner's model to score them.

    Attributes:
        model: as the learner runs it.
        params: the learner's, whole.
        dtype: of the learner's products.
        temperature: the rollout's.
        contexts: to look at.
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
        """Return the hidden states [S, D] before the compared tokens of all contexts; arguments as :meth:`score`."""
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
        """Pad rows to one shape, whatever was inserted: few programs are compiled."""
        longest = max(len(c.token_ids) for c in self.contexts) + ROOM
        shape = min(ROWS, len(self.contexts)), -(-longest // 128) * 128
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


MOST_CONTEXTS = 64
"""That are kept of a breach, or compared of a run folder."""


def make_subject(learner: Learner, config: Config, contexts: Sequence[Context], *, version: int) -> DiagnosisSubject:
    """Return the subject of a run: contexts, the learner's parameters of ``version``, and older ones."""
    params = learner.params
    older: dict[str, Callable[[], Params]] = {}
    if (before := learner.params_before()) is not None:
        older["the version before (the last optimizer update undone)"] = lambda: before
    if version:
        older["version 0 (the model's files)"] = lambda: _of_files(config, params)
    return DiagnosisSubject(
        model=learner.model,
        params=params,
        dtype=config.learner.compute_dtype,
        temperature=config.rollout.temperature,
        contexts=contexts,
        older=older,
    )


def _of_files(config: Config, like: Params) -> Params:
    """Load the model's files, sharded like other parameters."""
    return load_hf(config.model.path, shardings=jax.tree.map(lambda x: x.sharding, like))[1]
