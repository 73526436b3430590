"""The subject of a diagnosis: a few contexts, and the learner's model to score them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from jax_agent_rl.agreement import forward
from jax_agent_rl.agreement.logits import Tokens
from jax_agent_rl.config import Config
from jax_agent_rl.learner.comparison import Comparison, comparable
from jax_agent_rl.learner.learner import Learner
from jax_agent_rl.learner.parameterization import compute_params
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.hf import load_hf
from jax_agent_rl.types import Group, Support, Trajectory, digest_ids

MAX_CONTEXT_LEN = 1024
"""Ids that are examined of a context; what comes later is left out."""
MAX_CONTEXTS = 64
"""Contexts stored as evidence of a breach, or compared in a run folder."""
MAX_INSERTED = 128
"""Ids that a hypothesis may insert into a context."""
ROWS = 2
"""Contexts of one pass."""
LENGTH = 64
"""Rows are padded to a multiple of it, so that few programs are compiled."""

Scores = list[np.ndarray]
"""For each context the log-probs of its compared tokens, float64 [S]."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """One sequence of a trajectory.

    Attributes:
        name: id of its trajectory.
        token_ids: prompt and response.
        prompt: number of ids before the first sampled one.
        at: int [S], indices of the compared tokens in ``token_ids``.
        rollout: float64 [S], the engine's log-probs of them.
        learner: float64 [S], the learner's log-probs of them, where its own passes scored them.
        drifted: number of turns for which the engine reported another context than is trained on.
        supports: S supports of the compared tokens' draws; empty if none was restricted.
        starts: indices where a stretch of sampled ids or of inserted ids begins; they alternate,
            the first sampled stretch first.
        breach: index of the first token about which engine and learner disagree; None until it is
            known.
        differs_from: index of the first id whose activations differ while those of earlier ids
            agree; None until it is known.
    """

    name: str
    token_ids: tuple[int, ...]
    prompt: int
    at: np.ndarray
    rollout: np.ndarray
    learner: np.ndarray | None = None
    drifted: int = 0
    supports: tuple[Support | None, ...] = ()
    starts: tuple[int, ...] = ()
    breach: int | None = None
    differs_from: int | None = None

    def cut(self, length: int) -> Context:
        """Return the first ``length`` ids; later ones have no effect on them."""
        is_within = self.at < length
        learner = None
        if self.learner is not None:
            learner = self.learner[is_within]
        return replace(
            self,
            token_ids=self.token_ids[:length],
            at=self.at[is_within],
            rollout=self.rollout[is_within],
            learner=learner,
            supports=self.supports[: is_within.sum()],  # tokens are in order
            starts=tuple(start for start in self.starts if start < length),
        )

    def sampled_from(self, index: int) -> int:
        """Return where the stretch of ids begins that ``index`` is in."""
        return max((start for start in (0, *self.starts) if start <= index), default=0)

    def to_json(self) -> dict[str, Any]:
        saved = {}
        for name, value in vars(self).items():
            if isinstance(value, np.ndarray):
                value = value.tolist()
            saved[name] = value
        return saved

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Context:
        """Invert :meth:`to_json`."""
        values = dict(saved)
        values["at"] = np.asarray(saved["at"], np.int64)
        values["rollout"] = np.asarray(saved["rollout"], np.float64)
        if saved["learner"] is not None:
            values["learner"] = np.asarray(saved["learner"], np.float64)
        for name in ("token_ids", "supports", "starts"):
            # Files of earlier versions have neither supports nor starts.
            values[name] = tuple(saved.get(name, ()))
        return cls(**values)


def collect_contexts(
    groups: Sequence[Group],
    since: int,
    learner: Sequence[np.ndarray] | None = None,
    *,
    before: int | None = None,
) -> list[Context]:
    """Return every text context with comparable tokens, cut to ``MAX_CONTEXT_LEN`` ids.

    Args:
        since: first policy version of the parameters compared with.
        learner: for each trajectory the learner's log-probs of its tokens with loss, float64 [S].
        before: first policy version of later parameters; None: there are none.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    contexts = []
    for number, trajectory in enumerate(trajectories):
        begin = 0
        for sequence in trajectory.sequences:
            count = sum(sequence.loss_mask)
            logprobs = None
            if learner is not None:
                logprobs = learner[number][begin : begin + count]
            begin += count
            context = sequence_context(sequence, since=since, before=before, learner=logprobs)
            if context is not None:
                contexts.append(context)
    return contexts


def sequence_context(
    sequence: Trajectory,
    *,
    since: int,
    before: int | None = None,
    learner: np.ndarray | None = None,
) -> Context | None:
    """Return the context of one sequence of ids; None without comparable tokens, or with images.

    Args:
        sequence: one sequence of a trajectory; its segments are left out.
        since: first policy version of the parameters compared with.
        before: first policy version of later parameters; None: there are none.
        learner: the learner's log-probs of its tokens with loss.
    """
    if sequence.multi_modal or not any(sequence.response_mask):
        return None
    is_comparable = comparable(replace(sequence, history_window=None, segments=()), since, before)
    at = np.flatnonzero(sequence.loss_mask)[is_comparable]

    starts = []
    index = len(sequence.prompt_ids)
    for turn in sequence.turns:
        starts += [index, index + len(turn.output.token_ids)]
        index += len(turn.output.token_ids) + len(turn.appended_ids)

    learner_logprobs = None
    if learner is not None:
        learner_logprobs = learner[is_comparable]
    supports: tuple[Support | None, ...] = ()
    if sequence.restricted:
        supports = tuple(sequence.supports[i] for i in at)
    context = Context(
        name=sequence.trajectory_id,
        token_ids=(*sequence.prompt_ids, *sequence.response_ids),
        prompt=len(sequence.prompt_ids) + int(np.argmax(sequence.response_mask)),
        at=len(sequence.prompt_ids) + at,
        rollout=np.asarray(sequence.rollout_logprobs, np.float64)[at],
        learner=learner_logprobs,
        drifted=_count_drifted(sequence),
        supports=supports,
        starts=tuple(starts),
    )
    context = context.cut(MAX_CONTEXT_LEN)
    if not len(context.at):
        return None
    return context


def _count_drifted(sequence: Trajectory) -> int:
    """Count turns whose context in the engine is not the one trained on.

    It is 0 if the engine reports no contexts.
    """
    context = sequence.prompt_ids
    drifted = 0
    for turn in sequence.turns:
        context += turn.output.token_ids
        reported = turn.output.context_digest
        if reported and reported != digest_ids(context):
            drifted += 1
        context += turn.appended_ids
    return drifted


@dataclass(frozen=True, kw_only=True)
class Row:
    """A context as it is given to the model, which hypotheses edit.

    It may have other ids or positions; ids may be hidden, or have keys and values of other weights.

    Attributes:
        token_ids: int [T].
        at: int [S], indices of the compared tokens.
        positions: int [T].
        stale: bool [T], ids whose keys and values are of other weights.
        visible_from: int [T], the first index that attends to each id, if it is not its own.
        visible_until: int [T], one past the last index that attends to it.
    """

    token_ids: np.ndarray
    at: np.ndarray
    positions: np.ndarray
    stale: np.ndarray
    visible_from: np.ndarray
    visible_until: np.ndarray

    @classmethod
    def of(cls, context: Context) -> Row:
        """Return a context as it is."""
        count = len(context.token_ids)
        return cls(
            token_ids=np.asarray(context.token_ids, np.int32),
            at=context.at,
            positions=np.arange(count),
            stale=np.zeros(count, bool),
            visible_from=np.zeros(count, np.int64),
            visible_until=np.full(count, _FOREVER),
        )

    def first_change(self, plain: Row) -> int:
        """Return the first index whose output may differ from the unchanged context's."""
        count = min(len(self.token_ids), len(plain.token_ids))
        differs = np.zeros(count, bool)
        for name in ("token_ids", "positions", "stale", "visible_from"):
            differs |= getattr(self, name)[:count] != getattr(plain, name)[:count]
        first = count
        if differs.any():
            first = int(np.argmax(differs))

        # An id that is hidden later changes the outputs from where it is hidden.
        until = self.visible_until[:count]
        hidden_at = until[until != plain.visible_until[:count]]
        return min(first, int(hidden_at.min(initial=count)))

    def since(self, index: int) -> Row:
        """Return the ids from ``index`` on; indices still count from the first id."""
        return replace(
            self,
            token_ids=self.token_ids[index:],
            at=self.at[self.at > index],
            positions=self.positions[index:],
            stale=self.stale[index:],
            visible_from=self.visible_from[index:],
            visible_until=self.visible_until[index:],
        )

    def insert(self, index: int, ids: Sequence[int], *, shift_positions: bool = True) -> Row:
        """Insert ids before ``index``.

        Args:
            shift_positions: whether later positions are higher for it.
        """
        count = len(self.token_ids)
        positions = self.positions
        if shift_positions:
            positions = np.where(np.arange(count) >= index, positions + len(ids), positions)
        first_position = count
        if index < count:
            first_position = self.positions[index]
        indices = [index] * len(ids)
        return replace(
            self,
            token_ids=np.insert(self.token_ids, index, ids),
            positions=np.insert(positions, index, first_position + np.arange(len(ids))),
            at=np.where(self.at >= index, self.at + len(ids), self.at),
            stale=np.insert(self.stale, indices, False),
            visible_from=np.insert(self.visible_from, indices, 0),
            visible_until=np.insert(self.visible_until, indices, _FOREVER),
        )

    def drop(self, begin: int, end: int) -> Row:
        """Leave out the ids from ``begin`` to ``end``; later positions are lower for it.

        None of these ids is compared.
        """
        stays = np.ones(len(self.token_ids), bool)
        stays[begin:end] = False
        is_later = np.arange(len(stays)) >= end
        positions = np.where(is_later, self.positions - (end - begin), self.positions)
        return replace(
            self,
            token_ids=self.token_ids[stays],
            positions=positions[stays],
            at=np.where(self.at >= end, self.at - (end - begin), self.at),
            stale=self.stale[stays],
            visible_from=self.visible_from[stays],
            visible_until=self.visible_until[stays],
        )


_FOREVER = np.int64(1 << 30)


@dataclass(frozen=True, kw_only=True)
class DiagnosisSubject:
    """A few contexts, and the learner's model to score them.

    Attributes:
        params: the learner's parameters, all of them.
        dtype: dtype of the learner's products.
        temperature: the rollout's temperature.
        older: functions that make parameters of other versions, by description.
        pad_ids: ids used as padding.
        backend: ``rollout.backend``.
        adapters: whether the learner trains adapters.
        packed: makes the contexts with the learner's own log-probs, of its packed passes.
        gap: mean gap of the learner's own scores, where hypotheses are tried.
        longest: number of ids in the longest context, also of contexts that are not among these;
            None: there are no others.
    """

    model: DecoderConfig
    params: Params
    dtype: str
    temperature: float
    contexts: Sequence[Context]
    older: Mapping[str, Callable[[], Params]] = field(default_factory=dict)
    pad_ids: Sequence[int] = (0,)
    backend: str = ""
    adapters: bool = False
    packed: Callable[[], Sequence[Context]] | None = None
    gap: float = 0.0
    longest: int | None = None

    @property
    def rows(self) -> list[Row]:
        """The contexts as they are."""
        return [Row.of(context) for context in self.contexts]

    @property
    def ids(self) -> list[np.ndarray]:
        """The compared tokens' ids, int [S] per context."""
        return [np.asarray(context.token_ids)[context.at] for context in self.contexts]

    @property
    def supports(self) -> list[Support | None]:
        """The supports of all compared tokens' draws; empty if none was restricted."""
        supports: list[Support | None] = []
        for context in self.contexts:
            supports += context.supports or (None,) * len(context.at)
        if not any(supports):
            return []
        return supports

    def weights(self, params: Params | None = None, dtype: str | None = None) -> Params:
        """Return parameters, by default the learner's, as they enter products."""
        if params is None:
            params = self.params
        return compute_params(params, dtype or self.dtype)

    def hidden(
        self,
        rows: Sequence[Row] | None = None,
        *,
        model: DecoderConfig | None = None,
        weights: Params | None = None,
        prefix: Params | None = None,
        change: forward.LayerChange | None = None,
    ) -> np.ndarray:
        """Return the hidden states [S, D] before the compared tokens of all contexts.

        Args:
            rows: changed contexts.
            model: other hyperparameters.
            weights: other weights, of :meth:`weights`.
            prefix: weights of the rows' stale ids.
            change: tensors of single layers; for as many contexts as one pass has.
        """
        if rows is None:
            rows = self.rows
        if model is None:
            model = self.model
        if weights is None:
            weights = self.weights()

        hidden = []
        for begin in range(0, len(rows), ROWS):
            batch = rows[begin : begin + ROWS]
            inputs = self.inputs(batch)
            old = None
            if prefix is not None:
                old = forward.activations(model, prefix, inputs)
            states = np.asarray(forward.hidden_states(model, weights, inputs, old, change))
            for i, row in enumerate(batch):
                hidden.append(states[i, row.at - 1])  # an id's logits come from the id before it
        return np.concatenate(hidden)

    def inputs(self, rows: Sequence[Row]) -> forward.Inputs:
        """Pad rows to one of few shapes.

        Several rows are padded to the longest context, so that all passes over several are alike.
        """
        longest = max(len(row.token_ids) for row in rows)
        if len(self.contexts) > 1:
            longest = max(longest, self.longest or 0)
        row_count = min(ROWS, len(self.contexts))
        length = math.ceil(longest / LENGTH) * LENGTH
        shape = (row_count, length)

        ids = np.zeros(shape, np.int32)
        positions = np.tile(np.arange(length, dtype=np.int32), (row_count, 1))
        fresh = np.ones(shape, bool)
        visible_from = np.zeros(shape, np.int32)
        visible_until = np.full(shape, _FOREVER, np.int32)
        for i, row in enumerate(rows):
            count = len(row.token_ids)
            ids[i, :count] = row.token_ids
            positions[i, :count] = row.positions
            fresh[i, :count] = ~row.stale
            visible_from[i, :count] = row.visible_from
            visible_until[i, :count] = row.visible_until
        return forward.Inputs(
            token_ids=ids,
            positions=positions,
            fresh=fresh,
            visible_from=visible_from,
            visible_until=visible_until,
        )

    def hidden_since(self, row: Row, first: int, activations: forward.Activations) -> np.ndarray:
        """Return the hidden states before the compared tokens after ``first`` of a single context.

        Args:
            row: a row that differs from the context from ``first`` on.
            first: index of the first id to compute.
            activations: the learner's activations, of the context as it is.
        """
        suffix = row.since(first)
        inputs = self.inputs([suffix])

        assert activations.keys is not None and activations.values is not None
        # The prefix is the whole context, so that each `first` has the same shape. Its ids from
        # `first` on are hidden, and the indices of the suffix are higher for it.
        prefix_len = activations.keys.shape[3]
        shift = prefix_len - first
        prefix_until = np.full((1, prefix_len), _FOREVER, np.int32)
        row_until = np.minimum(row.visible_until[:first], _FOREVER)
        prefix_until[0, :first] = np.where(row_until < _FOREVER, row_until + shift, row_until)
        prefix_until[0, first:] = 0
        prefix = forward.ComputedPrefix(
            keys=activations.keys,
            values=activations.values,
            positions=np.arange(prefix_len, dtype=np.int32)[None],
            visible_until=prefix_until,
        )

        count = len(suffix.token_ids)
        visible_from = inputs.visible_from.copy()
        visible_from[0, :count] = np.where(suffix.visible_from > 0, suffix.visible_from + shift, 0)
        visible_until = inputs.visible_until.copy()
        visible_until[0, :count] = np.where(
            suffix.visible_until < _FOREVER, suffix.visible_until + shift, _FOREVER
        )
        inputs = replace(inputs, visible_from=visible_from, visible_until=visible_until)

        states = forward.hidden_states(self.model, self.weights(), inputs, prefix=prefix)
        return np.asarray(states)[0, suffix.at - 1 - first]

    def tokens(
        self, hidden: np.ndarray, params: Params | None = None, *, plain: np.ndarray | None = None
    ) -> Tokens:
        """Return the compared tokens with their hidden states, and their log-probs by a head.

        Args:
            hidden: [S, D].
            params: parameters of the head; the learner's by default.
            plain: float64 [S], the log-probs, if they are known.
        """
        if params is None:
            params = self.weights()
        longest = max(len(context.token_ids) for context in self.contexts)
        count = sum(len(context.at) for context in self.contexts)
        context_ids = np.full((count, longest), -1, np.int32)
        is_sampled = np.zeros((count, longest), bool)
        number = 0
        for context in self.contexts:
            for index in context.at:
                context_ids[number, :index] = context.token_ids[:index]
                is_sampled[number, context.sampled_from(index) : index] = True
                number += 1

        tokens = Tokens(
            params=params,
            temperature=self.temperature,
            softcap=self.model.logit_softcap,
            hidden=hidden,
            ids=np.concatenate(self.ids),
            rollout=np.concatenate([context.rollout for context in self.contexts]),
            plain=np.zeros(count),
            supports=self.supports,
            context_ids=context_ids,
            is_sampled=is_sampled,
        )
        if plain is None:
            plain = tokens.logprobs()
        return replace(tokens, plain=plain)

    def split(self, values: np.ndarray) -> Scores:
        """Split numbers of all compared tokens by context."""
        ends = np.cumsum([len(context.at) for context in self.contexts])
        return np.split(values, ends[:-1])

    def gaps(self, scores: Scores) -> Scores:
        """Return the engine's log-probs minus these."""
        gaps = []
        for context, context_scores in zip(self.contexts, scores, strict=True):
            gaps.append(context.rollout - context_scores)
        return gaps

    def compare(self, scores: Scores) -> Comparison:
        """Compare the engine's log-probs with these."""
        return Comparison.of(np.concatenate(self.gaps(scores)))


def make_subject(
    learner: Learner,
    config: Config,
    contexts: Sequence[Context],
    *,
    version: int,
    packed: Callable[[], Sequence[Context]] | None = None,
    is_before: bool = False,
) -> DiagnosisSubject:
    """Return the subject of a run: contexts, the parameters they were sampled from, and older ones.

    Args:
        version: policy version that the contexts were sampled from.
        packed: see :class:`DiagnosisSubject`.
        is_before: whether the learner has made one more update since ``version``, which is undone.
    """
    params = learner.params
    previous_params = learner.previous_params()
    older: dict[str, Callable[[], Params]] = {}
    if is_before:
        assert previous_params is not None
        params = previous_params
    elif previous_params is not None:
        older["the version before (the last optimizer update undone)"] = lambda: previous_params
    if version:
        shardings = jax.tree.map(lambda x: x.sharding, params)

        def load_model_files() -> Params:
            _, file_params = load_hf(config.model.path, shardings=shardings)
            return file_params

        older["version 0 (the model's files)"] = load_model_files
    return DiagnosisSubject(
        model=learner.model,
        params=params,
        dtype=config.learner.compute_dtype,
        temperature=config.rollout.temperature,
        contexts=contexts,
        older=older,
        backend=config.rollout.backend,
        adapters=config.learner.lora is not None,
        packed=packed,
    )
