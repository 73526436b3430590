"""The subject of a diagnosis: a few contexts, and the learner's model to score them under any setting."""

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
ROWS = 2
"""Contexts of one pass."""
LENGTH = 64
"""Rows are padded to a multiple of it: few programs are compiled."""

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
        starts: indices where sampled and inserted ids take turns, the first sampled ones first.
        breach: index of the first token about which engine and learner disagree, once that is
            known.
        differs_from: index of the first id whose activations differ where others do not, once that
            is known.
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
        return replace(
            self,
            token_ids=self.token_ids[:length],
            at=self.at[is_within],
            rollout=self.rollout[is_within],
            learner=None if self.learner is None else self.learner[is_within],
            supports=self.supports[: is_within.sum()],  # tokens are in order
            starts=tuple(start for start in self.starts if start < length),
        )

    def sampled_from(self, index: int) -> int:
        """Return where the stretch of ids begins that ``index`` is in."""
        return max((start for start in (0, *self.starts) if start <= index), default=0)

    def to_json(self) -> dict[str, Any]:
        return {
            name: x.tolist() if isinstance(x, np.ndarray) else x for name, x in vars(self).items()
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Context:
        """Invert :meth:`to_json`."""
        learner = None if saved["learner"] is None else np.asarray(saved["learner"], np.float64)
        arrays = {
            "at": np.asarray(saved["at"], np.int64),
            "rollout": np.asarray(saved["rollout"], np.float64),
        }
        # files of earlier versions have neither supports nor starts
        tuples = {name: tuple(saved.get(name, ())) for name in ("token_ids", "supports", "starts")}
        return cls(**{**saved, **arrays, **tuples, "learner": learner})


def collect_contexts(
    groups: Sequence[Group],
    since: int,
    learner: Sequence[np.ndarray] | None = None,
    *,
    before: int | None = None,
) -> list[Context]:
    """Return every text context with comparable tokens, cut to ``MAX_CONTEXT_LEN`` ids.

    Args:
        groups: with their trajectories.
        since: first policy version of the parameters compared with.
        learner: for each trajectory the learner's log-probs of its tokens with loss, float64 [S].
        before: first policy version of later parameters; None: there are none.
    """
    contexts = []
    for i, trajectory in enumerate(t for group in groups for t in group.trajectories):
        begin = 0
        for sequence in trajectory.sequences:
            count = sum(sequence.loss_mask)
            logprobs = None if learner is None else learner[i][begin : begin + count]
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
        sequence: of a trajectory; its segments are left out.
        since: see :func:`collect_contexts`.
        before: see :func:`collect_contexts`.
        learner: the learner's log-probs of its tokens with loss.
    """
    if sequence.multi_modal or not any(sequence.response_mask):
        return None
    mine = comparable(replace(sequence, history_window=None, segments=()), since, before)
    at = np.flatnonzero(sequence.loss_mask)[mine]
    starts = []
    index = len(sequence.prompt_ids)
    for turn in sequence.turns:
        starts += [index, index + len(turn.output.token_ids)]
        index += len(turn.output.token_ids) + len(turn.appended_ids)
    context = Context(
        name=sequence.trajectory_id,
        token_ids=(*sequence.prompt_ids, *sequence.response_ids),
        prompt=len(sequence.prompt_ids) + int(np.argmax(sequence.response_mask)),
        at=len(sequence.prompt_ids) + at,
        rollout=np.asarray(sequence.rollout_logprobs, np.float64)[at],
        learner=None if learner is None else learner[mine],
        drifted=_count_drifted(sequence),
        supports=tuple(sequence.supports[i] for i in at) if sequence.restricted else (),
        starts=tuple(starts),
    ).cut(MAX_CONTEXT_LEN)
    return context if len(context.at) else None


def _count_drifted(sequence: Trajectory) -> int:
    """Count turns whose context in the engine is not the one trained on; 0 if the engine reports none."""
    context = sequence.prompt_ids
    drifted = 0
    for turn in sequence.turns:
        context += turn.output.token_ids
        reported = turn.output.context_digest
        drifted += bool(reported) and reported != digest_ids(context)
        context += turn.appended_ids
    return drifted


@dataclass(frozen=True, kw_only=True)
class Row:
    """A context as it is given to the model: with other ids or positions, and some ids hidden or of other weights.

    Attributes:
        token_ids: int [T].
        at: int [S], indices of the compared tokens.
        positions: int [T].
        stale: bool [T], ids whose keys and values are of other weights.
        begins: int [T], the first index that attends to each id, if it is not its own.
        ends: int [T], one past the last index that does.
    """

    token_ids: np.ndarray
    at: np.ndarray
    positions: np.ndarray
    stale: np.ndarray
    begins: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, context: Context) -> Row:
        """Return a context as it is."""
        count = len(context.token_ids)
        return cls(
            token_ids=np.asarray(context.token_ids, np.int32),
            at=context.at,
            positions=np.arange(count),
            stale=np.zeros(count, bool),
            begins=np.zeros(count, np.int64),
            ends=np.full(count, _FOREVER),
        )

    def first_change(self, plain: Row) -> int:
        """Return the first index whose output may differ from that of a context as it is."""
        count = min(len(self.token_ids), len(plain.token_ids))
        differs = np.zeros(count, bool)
        for name in ("token_ids", "positions", "stale", "begins"):
            differs |= getattr(self, name)[:count] != getattr(plain, name)[:count]
        first = int(np.argmax(differs)) if differs.any() else count
        hidden = self.ends[:count][self.ends[:count] != plain.ends[:count]]
        return min(first, int(hidden.min(initial=count)))

    def since(self, index: int) -> Row:
        """Return the ids from ``index`` on; indices still count from the first id."""
        return replace(
            self,
            token_ids=self.token_ids[index:],
            at=self.at[self.at > index],
            positions=self.positions[index:],
            stale=self.stale[index:],
            begins=self.begins[index:],
            ends=self.ends[index:],
        )

    def insert(self, index: int, ids: Sequence[int], *, shift_positions: bool = True) -> Row:
        """Insert ids before ``index``.

        Args:
            index: in ``token_ids``.
            ids: to insert.
            shift_positions: whether later ids have higher positions for it.
        """
        count = len(self.token_ids)
        positions = self.positions
        if shift_positions:
            positions = np.where(np.arange(count) >= index, positions + len(ids), positions)
        first = self.positions[index] if index < count else count
        return replace(
            self,
            token_ids=np.insert(self.token_ids, index, ids),
            positions=np.insert(positions, index, first + np.arange(len(ids))),
            at=np.where(self.at >= index, self.at + len(ids), self.at),
            stale=np.insert(self.stale, [index] * len(ids), False),
            begins=np.insert(self.begins, [index] * len(ids), 0),
            ends=np.insert(self.ends, [index] * len(ids), _FOREVER),
        )

    def drop(self, begin: int, end: int) -> Row:
        """Leave out the ids from ``begin`` to ``end``, none of which is compared; later positions are lower for it."""
        stays = np.ones(len(self.token_ids), bool)
        stays[begin:end] = False
        positions = np.where(
            np.arange(len(stays)) >= end, self.positions - (end - begin), self.positions
        )
        return replace(
            self,
            token_ids=self.token_ids[stays],
            positions=positions[stays],
            at=np.where(self.at >= end, self.at - (end - begin), self.at),
            stale=self.stale[stays],
            begins=self.begins[stays],
            ends=self.ends[stays],
        )


_FOREVER = np.int64(1 << 30)


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
        backend: ``rollout.backend``.
        adapters: the learner trains adapters.
        packed: makes the contexts with the learner's own log-probs, of its packed passes.
        gap: mean gap of the learner's own scores, where hypotheses are tried.
        longest: ids of the longest context, of which there may be more than these; None: there are
            no others.
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
        return [np.asarray(c.token_ids)[c.at] for c in self.contexts]

    @property
    def supports(self) -> list[Support | None]:
        """The supports of all compared tokens' draws; empty if none was restricted."""
        supports = [support for c in self.contexts for support in c.supports or (None,) * len(c.at)]
        return supports if any(supports) else []

    def weights(self, params: Params | None = None, dtype: str | None = None) -> Params:
        """Return parameters, by default the learner's, as they enter products."""
        return compute_params(self.params if params is None else params, dtype or self.dtype)

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
        rows = self.rows if rows is None else rows
        model = model or self.model
        weights = self.weights() if weights is None else weights
        hidden = []
        for begin in range(0, len(rows), ROWS):
            batch = rows[begin : begin + ROWS]
            inputs = self.inputs(batch)
            old = None if prefix is None else forward.activations(model, prefix, inputs)
            states = np.asarray(forward.hidden_states(model, weights, inputs, old, change))
            for i, row in enumerate(batch):
                hidden.append(states[i, row.at - 1])
        return np.concatenate(hidden)

    def inputs(self, rows: Sequence[Row]) -> forward.Inputs:
        """Pad rows to one of few shapes: several to the longest context, so that all passes over several are alike."""
        longest = max(len(row.token_ids) for row in rows)
        if len(self.contexts) > 1:
            longest = max(longest, self.longest or 0)
        shape = (min(ROWS, len(self.contexts)), math.ceil(longest / LENGTH) * LENGTH)
        ids = np.zeros(shape, np.int32)
        positions = np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1))
        fresh = np.ones(shape, bool)
        begins = np.zeros(shape, np.int32)
        ends = np.full(shape, _FOREVER, np.int32)
        for i, row in enumerate(rows):
            count = len(row.token_ids)
            ids[i, :count] = row.token_ids
            positions[i, :count] = row.positions
            fresh[i, :count] = ~row.stale
            begins[i, :count] = row.begins
            ends[i, :count] = row.ends
        return forward.Inputs(
            token_ids=ids, positions=positions, fresh=fresh, begins=begins, ends=ends
        )

    def hidden_since(self, row: Row, first: int, activations: forward.Activations) -> np.ndarray:
        """Return the hidden states before the compared tokens after ``first`` of a single context.

        Args:
            row: that differs from the context from ``first`` on.
            first: index of the first id to compute.
            activations: the learner's, of the context as it is.
        """
        rest = row.since(first)
        inputs = self.inputs([rest])
        length = activations.keys.shape[3]
        place = np.arange(length, dtype=np.int32)[None]
        # Ids before come in the places of the whole context: those from `first` on are hidden, and
        # later indices move.
        moved = length - first
        ends = np.full((1, length), _FOREVER, np.int32)
        own_ends = np.minimum(row.ends[:first], _FOREVER)
        ends[0, :first] = np.where(own_ends < _FOREVER, own_ends + moved, own_ends)
        ends[0, first:] = 0
        count = len(rest.token_ids)
        begins, later_ends = inputs.begins.copy(), inputs.ends.copy()
        begins[0, :count] = np.where(rest.begins > 0, rest.begins + moved, 0)
        later_ends[0, :count] = np.where(rest.ends < _FOREVER, rest.ends + moved, _FOREVER)
        inputs = replace(inputs, begins=begins, ends=later_ends)
        prefix = forward.ComputedPrefix(
            keys=activations.keys, values=activations.values, positions=place, ends=ends
        )
        states = np.asarray(
            forward.hidden_states(self.model, self.weights(), inputs, prefix=prefix)
        )
        return states[0, rest.at - 1 - first]

    def tokens(
        self, hidden: np.ndarray, params: Params | None = None, *, plain: np.ndarray | None = None
    ) -> Tokens:
        """Return the compared tokens with their hidden states, and their log-probs by a head.

        Args:
            hidden: [S, D].
            params: of the head; the learner's by default.
            plain: the log-probs, if they are known.
        """
        longest = max(len(c.token_ids) for c in self.contexts)
        count = sum(len(c.at) for c in self.contexts)
        before = np.full((count, longest), -1, np.int32)
        sampled = np.zeros((count, longest), bool)
        number = 0
        for context in self.contexts:
            for index in context.at:
                before[number, :index] = context.token_ids[:index]
                sampled[number, context.sampled_from(index) : index] = True
                number += 1
        tokens = Tokens(
            params=self.weights() if params is None else params,
            temperature=self.temperature,
            hidden=hidden,
            ids=np.concatenate(self.ids),
            rollout=np.concatenate([c.rollout for c in self.contexts]),
            plain=np.zeros(count),
            supports=self.supports,
            before=before,
            sampled_before=sampled,
        )
        return replace(tokens, plain=tokens.logprobs() if plain is None else plain)

    def split(self, values: np.ndarray) -> Scores:
        """Split numbers of all compared tokens by context."""
        return np.split(values, np.cumsum([len(c.at) for c in self.contexts])[:-1])

    def gaps(self, scores: Scores) -> Scores:
        """Return the engine's log-probs minus these."""
        return [c.rollout - own for c, own in zip(self.contexts, scores, strict=True)]

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
        learner: with the parameters of ``version``.
        config: of the run.
        contexts: to score.
        version: policy version that the contexts were sampled from.
        packed: see :class:`DiagnosisSubject`.
        is_before: the learner's parameters are those of an update after ``version``, which is
            undone.
    """
    params = learner.params
    before = learner.previous_params()
    older: dict[str, Callable[[], Params]] = {}
    if is_before:
        assert before is not None
        params = before
    elif before is not None:
        older["the version before (the last optimizer update undone)"] = lambda: before
    if version:
        shardings = jax.tree.map(lambda x: x.sharding, params)
        older["version 0 (the model's files)"] = lambda: load_hf(
            config.model.path, shardings=shardings
        )[1]
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
