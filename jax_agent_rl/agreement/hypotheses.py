"""Settings under which the learner's model might reproduce the engine's log-probs, as trials.

A family of trials is a generator. It is sent the gap that each trial left, and may try values
between two good ones. A hypothesis is right if one of its trials leaves nothing unexplained. What
differs from context to context (how much padding, which turn) follows from the context, or may be
chosen for each; what does not (a number of the config) is one for all.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_agent_rl.agreement import forward
from jax_agent_rl.agreement.inspection import ROUNDED
from jax_agent_rl.agreement.logits import head_of, logprobs
from jax_agent_rl.agreement.report import Cause
from jax_agent_rl.agreement.subject import (
    LENGTH,
    MAX_INSERTED,
    Context,
    DiagnosisSubject,
    Row,
    Scores,
)
from jax_agent_rl.agreement.variations import ConfigField, config_fields, fitted_params
from jax_agent_rl.models.config import (
    DecoderConfig,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    Params,
    Rope,
    YarnScaling,
)
from jax_agent_rl.models.hf import tensor_names
from jax_agent_rl.models.layers import DTYPES, Quantized, quantized
from jax_agent_rl.models.parameters import Kind, parameter_at

GAIN = 0.95
"""Largest share of the gap that a value may leave if values near it are to be tried."""
OVER = 0.01
"""Share of the gap below which nothing is left to explain."""
OFFSETS = (1, -1, 2, -2, 4, 8, 16, 32, 64)
"""Offsets of positions."""
BUCKETS = (8, 16, 32, 64, 128, 512)
"""Lengths that engines pad to a multiple of."""
PAGES = (1, 4, 8, 16, 32, 64, 128)
"""Sizes of a KV cache's pages."""
MAX_CHANGED = 24
"""Most inserted ids that are left out, or repeated, one at a time."""
MAX_CUT = 6
"""Most inserted ids that are left out together."""
ADAPTER_SCALES = (2.0, 0.5, 4.0, 0.25)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One setting that the engine might have.

    Attributes:
        cause: what would be wrong.
        label: describes it, after the words "the engine".
        model: other hyperparameters.
        params: makes other weights.
        dtype: another dtype of products.
        prefix: makes the weights that the keys and values of stale ids are of.
        change: makes other tensors of one or two layers: the number of the first of them, and a
            layer's tree [2, ...].
        begins_at: returns the index from which on a context's tokens are scored under the setting;
            earlier ones have the learner's scores.
    """

    cause: Cause
    label: str
    model: DecoderConfig | None = None
    params: Callable[[], Params] | None = None
    dtype: str | None = None
    prefix: Callable[[], Params] | None = None
    edit_row: Callable[[Context, Row], Row] | None = None
    change: Callable[[], tuple[int, Params]] | None = None
    begins_at: Callable[[Context], int] | None = None

    @property
    def only_edits_rows(self) -> bool:
        """Whether the model is the learner's.

        What precedes the first edit then need not be computed again.
        """
        other_settings = (
            self.model,
            self.params,
            self.dtype,
            self.prefix,
            self.change,
            self.begins_at,
        )
        return self.edit_row is not None and not any(other_settings)

    def rows(self, subject: DiagnosisSubject) -> list[Row]:
        """Return the rows of all contexts, edited."""
        rows = []
        for context in subject.contexts:
            row = Row.of(context)
            if self.edit_row is not None:
                row = self.edit_row(context, row)
            rows.append(row)
        return rows

    def can_be_computed(self, subject: DiagnosisSubject) -> bool:
        """Return whether the model can compute it, see :func:`forward.remembers_ids_apart`."""
        if forward.remembers_ids_apart(subject.model):
            return True
        return self.prefix is None and subject.inputs(self.rows(subject)).are_plain

    def scores(
        self,
        subject: DiagnosisSubject,
        plain: Scores,
        activations: forward.Activations | None = None,
    ) -> Scores:
        """Score all contexts.

        Args:
            plain: the learner's scores.
            activations: the learner's activations in the contexts as they are. With them, neither
                layers before a :attr:`change` nor ids before an edit are computed again.
        """
        if self.change is not None and activations is not None:
            return self._scores_with_change(subject, *self.change(), activations)

        rows = self.rows(subject)
        if activations is not None and self.only_edits_rows:
            first = rows[0].first_change(Row.of(subject.contexts[0]))
            first -= first % LENGTH  # what is computed again has one of few shapes
            return [self._scores_since(subject, rows[0], first, plain[0], activations)]

        params = None
        if self.params is not None:
            params = self.params()
        if params is None and self.model is not None:
            params = fitted_params(subject.model, subject.params, self.model)
        weights = subject.weights(params, self.dtype)
        prefix = None
        if self.prefix is not None:
            prefix = subject.weights(self.prefix(), self.dtype)
        hidden = subject.hidden(rows, model=self.model, weights=weights, prefix=prefix)
        scores = subject.split(subject.tokens(hidden, weights).plain)
        if self.begins_at is None:
            return scores

        mixed_scores = []
        for context, before, after in zip(subject.contexts, plain, scores, strict=True):
            mixed_scores.append(np.where(context.at < self.begins_at(context), before, after))
        return mixed_scores

    def _scores_with_change(
        self,
        subject: DiagnosisSubject,
        first: int,
        tensors: Params,
        activations: forward.Activations,
    ) -> Scores:
        """Score all contexts with other tensors of layer ``first`` and the next."""
        weights = subject.weights()
        change = forward.LayerChange(
            layer_input=activations.input_of(first),
            first=first,
            tensors=subject.weights(tensors),
        )
        hidden = subject.hidden(weights=weights, change=change)
        return subject.split(subject.tokens(hidden, weights).plain)

    def _scores_since(
        self,
        subject: DiagnosisSubject,
        row: Row,
        first: int,
        plain: np.ndarray,
        activations: forward.Activations,
    ) -> np.ndarray:
        """Score a single context of which only ids from ``first`` on differ."""
        is_later = row.at > first
        if not is_later.any():
            return plain

        hidden = subject.hidden_since(row, first, activations)
        context = subject.contexts[0]
        supports = []
        if context.supports:
            supports = [context.supports[i] for i in np.flatnonzero(is_later)]
        ids = np.asarray(context.token_ids)[context.at[is_later]]
        by_temperature = logprobs(
            subject.weights(),
            hidden,
            ids,
            (subject.temperature,),
            supports,
            softcap=subject.model.logit_softcap,
        )
        scores = plain.copy()
        scores[is_later] = by_temperature[0]
        return scores


Trials = Generator[Trial, float, None]
"""Yields trials, and is sent the mean gap that each left."""
RowEdit = Callable[[Context, Row, int], Row]
"""An edit of a context's row at an index."""
Family = Callable[[DiagnosisSubject], Trials]


def with_one_in_memory(
    older: Mapping[str, Callable[[], Params]],
) -> dict[str, Callable[[], Params]]:
    """Return makers of other versions' parameters that keep only the latest one in memory."""
    latest: dict[str, Params] = {}

    def make(name: str) -> Params:
        if name not in latest:
            latest.clear()
            latest[name] = older[name]()
        return latest[name]

    return {name: functools.partial(make, name) for name in older}


# --- weights of other versions --------------------------------------------------------------------


def stale_version(subject: DiagnosisSubject) -> Trials:
    """Try older weights: all of them, from a turn on, or the head's alone."""
    first_context = subject.contexts[0]
    for name, make in subject.older.items():
        yield Trial(cause=Cause.STALE_VERSION, label=f"serves the weights of {name}", params=make)

        for kind, index in _each_boundary(subject):
            if index <= first_context.prompt:
                continue
            position = _describe_position(first_context, index)
            yield Trial(
                cause=Cause.STALE_VERSION,
                label=f"serves the weights of {name} from {position} on",
                params=make,
                begins_at=lambda context, kind=kind: _boundaries(context).get(kind, 0),
            )

        yield Trial(
            cause=Cause.STALE_VERSION,
            label=f"reads logits from a head that is still that of {name}",
            params=lambda make=make: subject.params | {"lm_head": head_of(make())},
        )


def adapter_scale(subject: DiagnosisSubject) -> Trials:
    """Try other scales of what was trained, if that is adapters on top of the model's files."""
    if not subject.adapters:
        return
    for name, make in subject.older.items():
        if "model's files" not in name:
            continue
        for scale in ADAPTER_SCALES:

            def rescale(make: Callable[[], Params] = make, scale: float = scale) -> Params:
                return jax.tree.map(
                    lambda base, trained: base + scale * (trained - base), make(), subject.params
                )

            label = f"applies the adapters with {scale:g} times their scale (alpha / rank)"
            yield Trial(cause=Cause.ADAPTER, label=label, params=rescale)


def stale_prefix(subject: DiagnosisSubject) -> Trials:
    """Try older keys and values of what precedes a turn, or of whole pages of it."""
    first_context = subject.contexts[0]
    request_ends = first_context.starts[1::2]

    def is_inside_turn(boundary: tuple[str, int]) -> bool:
        """Return whether no request ended there; caches hold what whole requests fed."""
        _, index = boundary
        return index not in request_ends

    boundaries = sorted(_each_boundary(subject), key=is_inside_turn)
    for name, make in subject.older.items():
        for (kind, end), page in itertools.product(boundaries, PAGES):
            if (end - 1) // page == 0:
                continue

            def mark_stale(context: Context, row: Row, kind: str = kind, page: int = page) -> Row:
                cached_len = 0
                end = _boundaries(context).get(kind)
                if end is not None:
                    cached_len = (end - 1) // page * page
                return replace(row, stale=np.arange(len(row.token_ids)) < cached_len)

            what = "prompts" if end <= first_context.prompt else "earlier turns"
            label = f"reads {what} from a cache that the weights of {name} filled"
            yield Trial(cause=Cause.STALE_PREFIX, label=label, prefix=make, edit_row=mark_stale)


# --- ids, positions, masks ------------------------------------------------------------------------


def _boundaries(context: Context) -> dict[str, int]:
    """Return the indices where something may begin to go wrong, by kind, the likeliest first.

    ``layers``: the first id whose activations differ. ``stretch``: the begin of the sampled or
    inserted stretch that has the first token that disagrees. ``before``: the begin of the stretch
    before it. ``breach``: the token itself. ``page``: the roundest index after the last token that
    agrees, where a page may begin. ``prompt``: the first sampled id.
    """
    boundaries: dict[str, int] = {}
    if context.differs_from is not None and context.differs_from < len(context.token_ids):
        boundaries["layers"] = context.differs_from

    breach = context.breach
    if breach is None:
        breach = int(context.at[-1]) + 1
    starts = _starts_of(context)
    earlier_starts = [start for start in reversed(starts) if start <= breach]
    if len(earlier_starts) >= 1:
        boundaries["stretch"] = earlier_starts[0]
    if len(earlier_starts) >= 2:
        boundaries["before"] = earlier_starts[1]

    agreeing = context.at[context.at < breach]
    if len(agreeing):
        boundaries["breach"] = breach
        boundaries["page"] = _roundest(int(agreeing[-1]) + 1, breach)
    boundaries["prompt"] = context.prompt
    return boundaries


def _starts_of(context: Context) -> tuple[int, ...]:
    """Return where stretches begin; without turns, only the first sampled id is known to."""
    return context.starts or (context.prompt,)


def _roundest(begin: int, end: int) -> int:
    """Return the multiple of the largest power of two from ``begin`` to ``end``."""
    step = 1
    while -(-begin // (2 * step)) * 2 * step <= end:
        step *= 2
    return -(-begin // step) * step


def _describe_position(context: Context, index: int, ids_before: int = 0) -> str:
    """Describe what begins at an index: ``turn 2``, ``what follows turn 1``, or ``id 240``.

    An id that begins no stretch is named by its index minus ``ids_before``.
    """
    starts = _starts_of(context)
    if index not in starts:
        return f"id {index - ids_before}"
    number = starts.index(index)
    turn = f"turn {number // 2 + 1}"
    if number % 2 == 0:
        return turn
    return f"what follows {turn}"


def _at_boundary(kind: str, edit: RowEdit) -> Callable[[Context, Row], Row]:
    """Return the edit of rows at a boundary; contexts without the boundary stay as they are."""

    def edit_row(context: Context, row: Row) -> Row:
        index = _boundaries(context).get(kind)
        if index is None:
            return row
        return edit(context, row, index)

    return edit_row


def _each_boundary(
    subject: DiagnosisSubject, *, only_starts: bool = False
) -> Iterator[tuple[str, int]]:
    """Yield the kind of each boundary, and where it is in the first context.

    Args:
        only_starts: leave out boundaries inside a turn or inside what was inserted.
    """
    context = subject.contexts[0]
    yielded = set()
    for kind, index in _boundaries(context).items():
        if index in yielded:
            continue
        if only_starts and index not in _starts_of(context):
            continue
        yielded.add(index)
        yield kind, index


def token_drift(subject: DiagnosisSubject) -> Trials:
    """Try ids that tokenizers and templates add or omit, first and between turns."""
    for kind, index in _each_boundary(subject, only_starts=True):
        if index > subject.contexts[0].prompt:
            yield from _drift_before_turn(subject, kind, index)
    for kind, index in _each_boundary(subject, only_starts=True):
        yield from _changed_insertions(subject.contexts[0], kind, index)

    for count in (1, 2, 3, 4, 8):
        if all(count + 1 < context.prompt for context in subject.contexts):
            first_ids = "id" if count == 1 else f"{count} ids"
            yield Trial(
                cause=Cause.TOKEN_DRIFT,
                label=f"saw no first {first_ids} of the context",
                edit_row=lambda context, row, count=count: row.drop(0, count),
            )

    yield Trial(
        cause=Cause.TOKEN_DRIFT,
        label="saw the context's first id (BOS) twice",
        edit_row=lambda context, row: row.insert(0, row.token_ids[:1].tolist()),
    )
    bos = subject.model.bos_token_id
    if bos is not None:
        yield Trial(
            cause=Cause.TOKEN_DRIFT,
            label=f"saw BOS (id {bos}) before the context",
            edit_row=lambda context, row: row.insert(0, [bos]),
        )


def _drift_before_turn(subject: DiagnosisSubject, kind: str, index: int) -> Trials:
    """Try the id before a stretch left out or repeated, and BOS or EOS in its place."""
    position = _describe_position(subject.contexts[0], index)

    def leave_out(context: Context, row: Row, at: int) -> Row:
        return _forget(row, at - 1, at)

    def repeat(context: Context, row: Row, at: int) -> Row:
        return row.insert(at, [row.token_ids[at - 1]])

    edits: dict[str, RowEdit] = {
        f"saw no id before {position}": leave_out,
        f"saw the id before {position} twice": repeat,
    }
    bos = subject.model.bos_token_id
    if bos is not None:

        def insert_bos(context: Context, row: Row, at: int) -> Row:
            return row.insert(at, [bos])

        edits[f"saw BOS (id {bos}) before {position}"] = insert_bos
    if subject.model.eos_token_ids:
        eos = subject.model.eos_token_ids[0]

        def insert_eos(context: Context, row: Row, at: int) -> Row:
            return row.insert(at, [eos])

        edits[f"saw EOS (id {eos}) before {position}"] = insert_eos

    for label, edit in edits.items():
        yield Trial(cause=Cause.TOKEN_DRIFT, label=label, edit_row=_at_boundary(kind, edit))


def _changed_insertions(first_context: Context, kind: str, index: int) -> Trials:
    """Try what was inserted after a turn without some of its ids, or with one twice.

    Args:
        index: where the inserted ids begin.
    """
    starts = first_context.starts
    if index not in starts or starts.index(index) % 2 == 0:
        return

    what = _describe_position(first_context, index)
    length = _end_of_stretch(first_context, index) - index
    edits: dict[str, RowEdit] = {}
    for number in range(min(length, MAX_CHANGED)):

        def leave_out(context: Context, row: Row, at: int, number: int = number) -> Row:
            return _forget(row, at + number, at + number + 1)

        edits[f"saw {what} without its id {number + 1}"] = leave_out

    for count in range(2, min(length, MAX_CUT + 1)):

        def cut_begin(context: Context, row: Row, at: int, count: int = count) -> Row:
            return _forget(row, at, at + count)

        def cut_end(context: Context, row: Row, at: int, count: int = count) -> Row:
            end = _end_of_stretch(context, at)
            return _forget(row, end - count, end)

        edits[f"saw {what} without its first {count} ids"] = cut_begin
        edits[f"saw {what} without its last {count} ids"] = cut_end

    def leave_out_all(context: Context, row: Row, at: int) -> Row:
        return _forget(row, at, _end_of_stretch(context, at))

    edits[f"did not see {what}"] = leave_out_all

    for number in range(min(length, MAX_CHANGED)):

        def repeat(context: Context, row: Row, at: int, number: int = number) -> Row:
            return row.insert(at + number, [row.token_ids[at + number]])

        edits[f"saw {what} with its id {number + 1} twice"] = repeat

    for label, edit in edits.items():
        yield Trial(cause=Cause.TOKEN_DRIFT, label=label, edit_row=_at_boundary(kind, edit))


def _end_of_stretch(context: Context, begin: int) -> int:
    """Return where the stretch of sampled or inserted ids ends that begins at an index."""
    return next((start for start in context.starts if start > begin), len(context.token_ids))


def _forget(row: Row, begin: int, end: int) -> Row:
    """Leave out ids; later positions are lower for it.

    If some of the ids are compared, all are only hidden from what follows.
    """
    is_compared = (row.at >= begin) & (row.at < end)
    if not is_compared.any():
        return row.drop(begin, end)

    visible_until = row.visible_until.copy()
    visible_until[begin:end] = end
    row = _shift_positions(row, end, -(end - begin))
    return replace(row, visible_until=visible_until)


def _shift_positions(row: Row, begin: int, offset: int) -> Row:
    """Add an offset to the positions from an index on."""
    is_later = np.arange(len(row.token_ids)) >= begin
    return replace(row, positions=np.where(is_later, row.positions + offset, row.positions))


def padding(subject: DiagnosisSubject) -> Trials:
    """Try padding on the left and where a turn begins: a few ids, or as many as fill a bucket."""
    for pad in dict.fromkeys((*subject.pad_ids, *subject.model.eos_token_ids[:1])):
        for kind, index in _each_boundary(subject, only_starts=True):
            if index > subject.contexts[0].prompt:
                yield from _padding_before_turn(subject, kind, index, pad)
        yield from _padded_prompts(pad)


def _padding_before_turn(subject: DiagnosisSubject, kind: str, index: int, pad: int) -> Trials:
    position = _describe_position(subject.contexts[0], index)
    for count, shift in itertools.product((1, 2, 3, 4, 8), (True, False)):

        def insert(
            context: Context, row: Row, at: int, count: int = count, shift: bool = shift
        ) -> Row:
            return row.insert(at, [pad] * count, shift_positions=shift)

        label = f"sees {_count(count, 'padding id')} ({pad}) before {position}"
        yield Trial(cause=Cause.PADDING, label=label, edit_row=_at_boundary(kind, insert))

    for size, shift in itertools.product(BUCKETS, (True, False)):

        def fill(context: Context, row: Row, at: int, size: int = size, shift: bool = shift) -> Row:
            return row.insert(at, [pad] * _missing(at, size), shift_positions=shift)

        label = f"sees the padding ids ({pad}) that fill contexts up to {size} before {position}"
        yield Trial(cause=Cause.PADDING, label=label, edit_row=_at_boundary(kind, fill))


def _padded_prompts(pad: int) -> Trials:
    """Try padding before prompts, and between a prompt and the first sampled id."""
    for count in (1, 2, 3, 4, 6, 8, 16, 32, 64):
        yield Trial(
            cause=Cause.PADDING,
            label=f"sees {_count(count, 'padding id')} ({pad}) before the prompt",
            edit_row=lambda context, row, count=count: row.insert(0, [pad] * count),
        )

    for size in BUCKETS:
        label = f"sees the padding ids ({pad}) that fill prompts up to {size}"

        def fill_left(context: Context, row: Row, size: int = size) -> Row:
            return row.insert(0, [pad] * _missing(context.prompt, size))

        yield Trial(cause=Cause.PADDING, label=f"{label} from the left", edit_row=fill_left)
        for shift in (True, False):

            def fill_right(
                context: Context, row: Row, size: int = size, shift: bool = shift
            ) -> Row:
                ids = [pad] * _missing(context.prompt, size)
                return row.insert(context.prompt, ids, shift_positions=shift)

            yield Trial(cause=Cause.PADDING, label=label, edit_row=fill_right)


def _missing(count: int, size: int) -> int:
    """Return how many ids are missing to a multiple of ``size``; 0 if too many to insert."""
    missing = -count % size
    if missing > MAX_INSERTED:
        return 0
    return missing


def position(subject: DiagnosisSubject) -> Trials:
    """Try positions that are shifted, restart or stand still, everywhere or for sampled ids."""
    first_context = subject.contexts[0]
    starts = first_context.starts
    for kind, index in _each_boundary(subject):
        yield from _shifted(first_context, kind, index, OFFSETS[:4])

        for ids_before in _ids_before(kind):

            def restart(context: Context, row: Row, at: int, ids_before: int = ids_before) -> Row:
                begin = at - ids_before
                return _shift_positions(row, begin, -begin)

            position = _describe_position(first_context, index, ids_before)
            label = f"lets positions begin again at 0 at {position}"
            yield Trial(cause=Cause.POSITION, label=label, edit_row=_at_boundary(kind, restart))

        if index > first_context.prompt and index in starts:
            previous_start = starts[starts.index(index) - 1]
            position = _describe_position(first_context, previous_start)
            label = f"does not count the positions of {position}"
            edit_row = _at_boundary(kind, _stand_still)
            yield Trial(cause=Cause.POSITION, label=label, edit_row=edit_row)

    for kind, index in _each_boundary(subject):
        yield from _shifted(first_context, kind, index, OFFSETS[4:])

    if len(starts) < 2:
        return
    for offset in OFFSETS:

        def shift_sampled(context: Context, row: Row, offset: int = offset) -> Row:
            positions = np.where(_is_sampled(context), row.positions + offset, row.positions)
            return replace(row, positions=positions)

        label = f"puts sampled tokens, and no others, {_describe_offset(offset)}"
        yield Trial(cause=Cause.POSITION, label=label, edit_row=shift_sampled)


def _ids_before(kind: str) -> tuple[int, ...]:
    """Return how many ids before a boundary the fault may begin.

    Engines that prefill without a context's last id feed it like a sampled one. The first token
    that disagrees follows the id where the fault began.
    """
    if kind == "breach":
        return (1,)
    if kind in ("layers", "page"):
        return (0,)
    return (0, 1)


def _shifted(first_context: Context, kind: str, index: int, offsets: Sequence[int]) -> Trials:
    is_prompt = index <= first_context.prompt
    for offset, ids_before in itertools.product(offsets, _ids_before(kind)):

        def shift(
            context: Context, row: Row, at: int, offset: int = offset, ids_before: int = ids_before
        ) -> Row:
            return _shift_positions(row, at - ids_before, offset)

        if is_prompt:
            label = f"puts sampled tokens {_describe_offset(offset)}"
        else:
            position = _describe_position(first_context, index, ids_before)
            label = f"puts ids {_describe_offset(offset)} from {position} on"
        yield Trial(cause=Cause.POSITION, label=label, edit_row=_at_boundary(kind, shift))


def _describe_offset(offset: int) -> str:
    direction = "further" if offset > 0 else "back"
    return f"{_count(abs(offset), 'position')} {direction}"


def _stand_still(context: Context, row: Row, at: int) -> Row:
    """Let positions from an index on continue those before the previous stretch."""
    previous_start = _previous_start(context, at)
    if previous_start is None:
        return row
    return _shift_positions(row, at, -(at - previous_start))


def _previous_start(context: Context, start: int) -> int | None:
    """Return where the stretch before the one that begins at ``start`` begins, if there is one."""
    if start not in context.starts:
        return None
    number = context.starts.index(start)
    if number == 0:
        return None
    return context.starts[number - 1]


def _is_sampled(context: Context) -> np.ndarray:
    """Return which ids engines feed in decode steps, bool [T].

    These are the sampled ids and, before each stretch of them, the id that they were sampled after.
    The last id of a stretch is fed with what was inserted after it.
    """
    length = len(context.token_ids)
    is_sampled = np.zeros(length, bool)
    edges = [*context.starts, length]
    for begin, end in zip(edges[::2], edges[1::2], strict=False):
        is_sampled[max(begin - 1, 0) : end] = True
        if end < length:
            is_sampled[end - 1 : end] = False
    return is_sampled


def mask(subject: DiagnosisSubject) -> Trials:
    """Try ids lost from the cache where a turn begins, and tokens that do not see themselves."""

    def hide_from_themselves(context: Context, row: Row) -> Row:
        index = np.arange(len(row.token_ids))
        is_sampled = _is_sampled(context) & (index > 0)
        return replace(row, visible_from=np.where(is_sampled, index + 1, row.visible_from))

    yield Trial(
        cause=Cause.MASK,
        label="computes as if sampled tokens do not attend to themselves",
        edit_row=hide_from_themselves,
    )

    first_context = subject.contexts[0]
    for kind, index in _each_boundary(subject):
        position = _describe_position(first_context, index)
        previous_start = _previous_start(first_context, index)
        previous = "the prompt"
        if previous_start is not None:
            previous = _describe_position(first_context, previous_start)

        for ids_before in (0, 1):

            def hide_last(context: Context, row: Row, at: int, ids_before: int = ids_before) -> Row:
                end = at - ids_before
                return _hide(row, end - 1, end, since=end)

            label = f"computes as if the last id of {previous} is not attended to"
            yield Trial(cause=Cause.MASK, label=label, edit_row=_at_boundary(kind, hide_last))

        for ids_before in (0, 1):

            def hide_all(context: Context, row: Row, at: int, ids_before: int = ids_before) -> Row:
                end = at - ids_before
                return _hide(row, 0, end, since=end)

            label = f"computes as if nothing before {position} is attended to"
            yield Trial(cause=Cause.MASK, label=label, edit_row=_at_boundary(kind, hide_all))

        if previous_start is not None:
            label = f"computes as if {previous} is not attended to later"
            yield Trial(cause=Cause.MASK, label=label, edit_row=_at_boundary(kind, _hide_stretch))

        for page in PAGES[1:]:

            def hide_page(context: Context, row: Row, at: int, page: int = page) -> Row:
                return _hide(row, at // page * page, at, since=at)

            label = (
                f"computes as if a page of {page} ids that {position} begins in is lost before it"
            )
            yield Trial(cause=Cause.MASK, label=label, edit_row=_at_boundary(kind, hide_page))


def _hide(row: Row, begin: int, end: int, *, since: int) -> Row:
    """Hide ids from ``begin`` to ``end`` from all ids from ``since`` on."""
    index = np.arange(len(row.token_ids))
    is_hidden = (index >= begin) & (index < end)
    visible_until = np.where(is_hidden, np.minimum(row.visible_until, since), row.visible_until)
    return replace(row, visible_until=visible_until)


def _hide_stretch(context: Context, row: Row, at: int) -> Row:
    previous_start = _previous_start(context, at)
    if previous_start is None:
        return row
    return _hide(row, previous_start, at, since=at)


# --- numbers of the config ------------------------------------------------------------------------


def settings_of(cause: Cause) -> Family:
    """Return the family of all fields of the config whose other values would have this cause."""

    def family(subject: DiagnosisSubject) -> Trials:
        longest = subject.longest or max(len(context.token_ids) for context in subject.contexts)
        fields = [field for field in config_fields(subject.model) if _cause_of(field) is cause]
        candidates = [(field, value) for field in fields for value in field.usual]
        candidates += [(field, value) for field in fields for value in field.derived]

        gaps: dict[str, dict[float, float]] = {}
        for field, value in candidates:
            if not _has_effect(field, value, longest):
                continue
            trial = _setting(subject, cause, field, value)
            if trial is None:
                continue
            gap = yield trial
            if field.is_number and isinstance(value, float):
                gaps.setdefault(field.path, {})[value] = gap

        if cause is Cause.ROTARY and subject.model.local_rope is not None:
            yield _exchanged_ropes(subject.model)
        yield from _between(subject, cause, fields, gaps)

    return family


def _cause_of(field: ConfigField) -> Cause:
    root = field.path.partition(".")[0]
    if root in ("rope", "local_rope"):
        return Cause.ROTARY
    if root in ("sliding_window", "windowed_layers"):
        return Cause.WINDOW
    if root == "experts":
        return Cause.EXPERTS
    return Cause.SETTING


def _has_effect(field: ConfigField, value: Any, longest: int) -> bool:
    """Return whether a value can be told from the field's own in contexts of this length."""
    if field.path == "sliding_window" and value is not None:
        return value < longest
    return True


def _setting(
    subject: DiagnosisSubject, cause: Cause, field: ConfigField, value: Any
) -> Trial | None:
    model = field.config_with(value)
    if fitted_params(subject.model, subject.params, model) is None:
        return None
    return Trial(cause=cause, label=_describe_setting(subject.model, field, value), model=model)


def _exchanged_ropes(model: DecoderConfig) -> Trial:
    assert model.local_rope is not None
    other = replace(model, rope=model.local_rope, local_rope=model.rope)
    label = "rotates full and windowed layers by each other's settings"
    return Trial(cause=Cause.ROTARY, label=label, model=other)


def _between(
    subject: DiagnosisSubject,
    cause: Cause,
    fields: Sequence[ConfigField],
    gaps: dict[str, dict[float, float]],
) -> Trials:
    """Try values between those of the number that left the smallest gap, if it left less.

    Args:
        gaps: by the path of a field, the gap that each value left.
    """
    smallest_gaps = {path: min(by_value.values()) for path, by_value in gaps.items()}
    if not smallest_gaps:
        return
    path = min(smallest_gaps, key=lambda path: smallest_gaps[path])
    if smallest_gaps[path] > GAIN * subject.gap or smallest_gaps[path] <= OVER * subject.gap:
        return

    field = next(field for field in fields if field.path == path)
    known = {float(field.value): subject.gap, **gaps[path]}
    for _ in range(8):
        values = sorted(value for value in known if value > 0)
        best = values.index(min(values, key=lambda value: known[value]))
        lower = values[max(best - 1, 0)]
        upper = values[min(best + 1, len(values) - 1)]
        for low, high in ((lower, values[best]), (values[best], upper)):
            for share in (1 / 3, 2 / 3):
                value = float(low ** (1 - share) * high**share)
                if value in known:
                    continue
                trial = _setting(subject, cause, field, value)
                if trial is not None:
                    known[value] = yield trial
        if min(known.values()) <= OVER * subject.gap:
            return


def _describe_setting(model: DecoderConfig, field: ConfigField, value: Any) -> str:
    """Return a label: after "the engine"."""
    changed = field.config_with(value)
    match field.path:
        case "rope" | "rope.theta" | "rope.scaling" if changed.rope != model.local_rope:
            return f"rotates by {_describe_rope(changed.rope)}"
        case "rope":
            return "rotates by the windowed layers' settings everywhere"
        case "local_rope":
            return "rotates by the full layers' settings everywhere"
        case "rope.interleaved":
            if value:
                return "rotates neighbouring numbers, not halves of a head"
            return "rotates halves of a head, not neighbouring numbers"
        case "sliding_window":
            return f"has {_describe_window(model, changed)}"
        case "windowed_layers":
            return f"has {_describe_windowed(value)}"
        case "experts.per_token":
            assert model.experts is not None
            experts = _count(value, "expert")
            return f"takes {experts} a token (the model has {model.experts.per_token})"
        case "experts.normalize":
            if value:
                return "takes experts with weights normalized"
            return "takes experts with weights not normalized"

    model_value = field.value
    if field.path == "attention_scale":  # None stands for a number
        model_value = model.score_scale
        value = changed.score_scale
    return (
        f"computes with {field.path}={_describe_value(value)}, not {_describe_value(model_value)}"
    )


def _describe_value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return str(value)


def _describe_window(model: DecoderConfig, changed: DecoderConfig) -> str:
    if changed.sliding_window is None:
        return "no window at all"
    if model.sliding_window is None or not any(model.windowed_layers):
        return f"a window of {changed.sliding_window}, the model has none"
    return f"a window of {changed.sliding_window}, not {model.sliding_window}"


def _describe_windowed(layers: Sequence[bool]) -> str:
    if not any(layers):
        return "no window at all"
    if all(layers):
        return "the window in every layer"
    return "the window in other layers"


def _describe_rope(rope: Rope) -> str:
    match rope.scaling:
        case None:
            scaling = "no scaling"
        case LinearScaling(factor=factor):
            scaling = f"linear scaling by {factor:g}"
        case Llama3Scaling(factor=factor):
            scaling = f"Llama 3's scaling by {factor:g}"
        case YarnScaling(factor=factor):
            scaling = f"YaRN by {factor:g}"
        case DynamicScaling(factor=factor):
            scaling = f"dynamic NTK by {factor:g}"
        case other:
            scaling = str(other)
    return f"theta={rope.theta:.4g} and {scaling}"


def _count(count: int, noun: str) -> str:
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun}s"


# --- precision ------------------------------------------------------------------------------------


def dtype(subject: DiagnosisSubject) -> Trials:
    """Try weights alone, or all products, in a coarser dtype."""
    for name in ROUNDED:
        if name == subject.dtype:
            continue

        def cast(name: str = name) -> Params:
            return jax.tree.map(lambda x: x.astype(name).astype(x.dtype), subject.params)

        yield Trial(cause=Cause.DTYPE, label=f"rounds weights to {name}", params=cast)
        yield Trial(cause=Cause.DTYPE, label=f"computes in {name}", dtype=name)
    for name in DTYPES:
        params = functools.partial(_params_in_8_bits, subject, name)
        yield Trial(cause=Cause.DTYPE, label=f"rounds weights to {name}", params=params)


def weights_in(subject: DiagnosisSubject, precision: str) -> Params | None:
    """Return the learner's weights as they enter products in a coarser precision.

    None if there is no such dtype.
    """
    if precision in DTYPES:
        return subject.weights(_params_in_8_bits(subject, precision))
    if precision in ROUNDED and precision != subject.dtype:
        return subject.weights(dtype=precision)
    return None


def _params_in_8_bits(subject: DiagnosisSubject, name: str) -> Params:
    layers = {}
    for key, x in subject.params["layers"].items():
        if parameter_at(["layers", key]).is_matrix:
            x = _round_to_8_bits(x, DTYPES[name])
        layers[key] = x
    return subject.params | {"layers": layers}


def _round_to_8_bits(x: jax.Array, dtype: Any) -> jax.Array:
    rounded: Quantized = quantized(x, dtype, axis=-1)
    return (rounded.numbers.astype(jnp.float32) * rounded.scale).astype(x.dtype)


# --- tensors --------------------------------------------------------------------------------------


def tensors_of_all_layers(subject: DiagnosisSubject) -> Trials:
    """Try tensors missing, exchanged or transposed in every layer, and layers in another order."""
    params = subject.params
    layers = params["layers"]
    names = _LayerNames(subject.model)

    def trial(cause: Cause, label: str, change: Callable[[], dict[str, jax.Array]]) -> Trial:
        def changed_params() -> Params:
            return params | {"layers": layers | change()}

        return Trial(cause=cause, label=label, params=changed_params)

    for first, second in names.pairs():

        def exchange(first: str = first, second: str = second) -> dict[str, jax.Array]:
            return {first: layers[second], second: layers[first]}

        label = (
            f"holds {names.in_any_layer(first)} and {names.in_any_layer(second)} in each other's"
            " place in every layer"
        )
        yield trial(Cause.MISNAMED_TENSOR, label, exchange)

    for key, x in layers.items():
        if not _can_be_transposed(key, x):
            continue

        def transpose(key: str = key, x: jax.Array = x) -> dict[str, jax.Array]:
            return {key: x.swapaxes(-1, -2)}

        label = f"holds {names.in_any_layer(key)} transposed in every layer"
        yield trial(Cause.TRANSPOSED_TENSOR, label, transpose)

    for order, reorder in _head_orders(subject.model, layers).items():
        yield trial(Cause.MISNAMED_TENSOR, f"computes as if {order}", reorder)

    for key, x in layers.items():

        def reset(key: str = key, x: jax.Array = x) -> dict[str, jax.Array]:
            return {key: _blank(subject.model, key, x)}

        label = f"has no {names.in_any_layer(key)} in any layer"
        yield trial(Cause.MISSING_TENSOR, label, reset)

    for step, what in ((1, "holds the one before it"), (-1, "holds the one after it")):

        def roll(step: int = step) -> dict[str, jax.Array]:
            return {key: jnp.roll(x, step, axis=0) for key, x in layers.items()}

        label = f"has the layers in another order: each layer {what}"
        yield trial(Cause.MISNAMED_TENSOR, label, roll)


def tensors_of_one_layer(layers: Sequence[int]) -> Family:
    """Return the family of one wrong tensor in one of these layers.

    Trials of later layers are cheaper, and come first.
    """

    def family(subject: DiagnosisSubject) -> Trials:
        for layer in sorted(layers, reverse=True):
            yield from _tensors_of_layer(subject, layer)

    return family


LayerPair = Params
"""The tensors of a layer and of the next one, each [2, ...]."""


def _tensors_of_layer(subject: DiagnosisSubject, layer: int) -> Trials:
    model = subject.model
    names = _LayerNames(model)
    stacks = subject.params["layers"]
    stacked = {key: stacks[key] for key in stacks if layer in model.layers_with(key)}

    def trial(cause: Cause, label: str, change: Callable[[LayerPair], LayerPair]) -> Trial:
        def changed_pair() -> tuple[int, LayerPair]:
            tensors = {key: _pair_at(model, key, x, layer) for key, x in stacks.items()}
            return layer, tensors | change(tensors)

        def changed_params() -> Params:
            return _with_layers(subject, *changed_pair())

        return Trial(cause=cause, label=label, change=changed_pair, params=changed_params)

    for key in stacked:

        def reset(tensors: LayerPair, key: str = key) -> LayerPair:
            return {key: _with_first(tensors[key], _blank(model, key, tensors[key][0]))}

        yield trial(Cause.MISSING_TENSOR, f"has no {names.in_layer(key, layer)}", reset)

    def leave_out(tensors: LayerPair) -> LayerPair:
        """Set to zero whatever adds to the residual stream."""
        changed = {}
        for key in ("o", "down", "expert_down", "o_bias", "expert_down_bias"):
            if key in stacked:
                changed[key] = _with_first(tensors[key], tensors[key][0] * 0)
        return changed

    yield trial(Cause.MISSING_TENSOR, f"leaves out layer {layer}", leave_out)

    for first, second in names.pairs():
        if first not in stacked or second not in stacked:
            continue

        def exchange(tensors: LayerPair, first: str = first, second: str = second) -> LayerPair:
            return {
                first: _with_first(tensors[first], tensors[second][0]),
                second: _with_first(tensors[second], tensors[first][0]),
            }

        label = (
            f"holds {names.in_layer(first, layer)} and {names.in_layer(second, layer)} in each"
            " other's place"
        )
        yield trial(Cause.MISNAMED_TENSOR, label, exchange)

    for key, x in stacked.items():
        name = names.in_layer(key, layer)
        if _can_be_transposed(key, x):

            def transpose(tensors: LayerPair, key: str = key) -> LayerPair:
                return {key: _with_first(tensors[key], tensors[key][0].swapaxes(-1, -2))}

            yield trial(Cause.TRANSPOSED_TENSOR, f"holds {name} transposed", transpose)

        if parameter_at(["layers", key]).is_of_experts:

            def reverse_experts(tensors: LayerPair, key: str = key) -> LayerPair:
                return {key: _with_first(tensors[key], tensors[key][0][::-1])}

            label = f"holds the experts of {name} in another order (the last one first)"
            yield trial(Cause.MISNAMED_TENSOR, label, reverse_experts)

        if layer + 1 in model.layers_with(key):

            def exchange_layers(tensors: LayerPair, key: str = key) -> LayerPair:
                return {key: tensors[key][::-1]}

            next_name = names.in_layer(key, layer + 1)
            label = f"holds {name} and {next_name} in each other's place"
            yield trial(Cause.MISNAMED_TENSOR, label, exchange_layers)


def _pair_at(model: DecoderConfig, key: str, stack: jax.Array, layer: int) -> jax.Array:
    """Return a parameter of a layer and of the next one, [2, ...].

    In place of a layer without it there is the last one that has it; nobody looks at it.
    """
    with_key = model.layers_with(key)
    indices = []
    for number in (layer, layer + 1):
        indices.append(with_key.index(number) if number in with_key else len(with_key) - 1)
    return stack[jnp.asarray(indices)]


def _can_be_transposed(key: str, x: jax.Array) -> bool:
    return x.shape[-1] == x.shape[-2] and parameter_at(["layers", key]).is_matrix


def _with_first(pair: jax.Array, value: jax.Array) -> jax.Array:
    """Return the tensors of two layers with another one in the first."""
    return pair.at[0].set(value)


def _with_layers(subject: DiagnosisSubject, first: int, tensors: LayerPair) -> Params:
    """Return all parameters, with one layer's and the next one's replaced."""
    layers = {}
    for key, x in subject.params["layers"].items():
        with_key = subject.model.layers_with(key)
        for layer, tensor in zip((first, first + 1), tensors[key], strict=True):
            if layer in with_key:
                x = x.at[with_key.index(layer)].set(tensor)
        layers[key] = x
    return subject.params | {"layers": layers}


def _blank(model: DecoderConfig, key: str, x: jax.Array) -> jax.Array:
    """Return a tensor as it is before anything is loaded: the identity if it is a norm or a factor.

    All others are zeros.
    """
    kind = parameter_at(["layers", key]).kind
    if kind in (Kind.PLAIN_NORM, Kind.FACTOR) or (kind is Kind.NORM and not model.norm_offset):
        return jnp.ones_like(x)
    return jnp.zeros_like(x)


def _head_orders(
    model: DecoderConfig, layers: Params
) -> dict[str, Callable[[], dict[str, jax.Array]]]:
    """Return other orders of the heads."""
    heads = model.num_heads
    kv_heads = model.num_kv_heads
    if not 1 < kv_heads < heads:
        return {}
    head_order = np.arange(heads).reshape(heads // kv_heads, kv_heads).T.reshape(-1)
    row_order = (head_order[:, None] * model.head_dim + np.arange(model.head_dim)).reshape(-1)

    def take_turns() -> dict[str, jax.Array]:
        changed = {"q": layers["q"][:, row_order], "o": layers["o"][:, :, row_order]}
        if "q_bias" in layers:
            changed["q_bias"] = layers["q_bias"][:, row_order]
        if "sinks" in layers:
            changed["sinks"] = layers["sinks"][:, head_order]
        return changed

    return {"query heads take turns among the key/value heads": take_turns}


class _LayerNames:
    """Published names of the tensors of layers."""

    def __init__(self, model: DecoderConfig) -> None:
        self._model = model
        self._names = tensor_names(model)["layers"]
        self._shapes = model.parameter_shapes()["layers"]

    def in_layer(self, key: str, layer: int) -> str:
        """Return the name of one layer's tensor, or of the first of its experts."""
        name = self._names[key][self._model.layers_with(key).index(layer)]
        if isinstance(name, list):
            return f"{name[0]} and the other experts'"
        return str(name)

    def in_any_layer(self, key: str) -> str:
        """Return the name without the layer."""
        name = self._names[key][0]
        if isinstance(name, list):
            name = name[0]
        _, _, name_in_layer = str(name).partition("layers.0.")
        return name_in_layer or str(name)

    def pairs(self) -> list[tuple[str, str]]:
        """Return the parameters of a layer that can be exchanged: they have equal shapes."""
        pairs = []
        for first, second in itertools.combinations(self._shapes, 2):
            if self._shapes[first] == self._shapes[second]:
                pairs.append((first, second))
        return pairs


FAMILIES: dict[Cause, Family] = {
    Cause.STALE_VERSION: stale_version,
    Cause.ADAPTER: adapter_scale,
    Cause.STALE_PREFIX: stale_prefix,
    Cause.POSITION: position,
    Cause.TOKEN_DRIFT: token_drift,
    Cause.MASK: mask,
    Cause.SETTING: settings_of(Cause.SETTING),
    Cause.ROTARY: settings_of(Cause.ROTARY),
    Cause.WINDOW: settings_of(Cause.WINDOW),
    Cause.EXPERTS: settings_of(Cause.EXPERTS),
    Cause.PADDING: padding,
    Cause.DTYPE: dtype,
}
"""By cause, in the order in which they are tried, unless something speaks for others."""
PER_CONTEXT = frozenset(
    {Cause.STALE_PREFIX, Cause.POSITION, Cause.PADDING, Cause.TOKEN_DRIFT, Cause.MASK}
)
"""Causes whose best trial is chosen for each context."""
