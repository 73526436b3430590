"""Settings under which the learner's model might reproduce the engine's log-probs, as trials to be scored.

A family of trials is a generator. It is sent what each trial left of the gap, and may try values
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
"""Share of the gap that a number may leave for others near it to be tried."""
OVER = 0.01
"""Share of the gap below which nothing is left to explain."""
OFFSETS = (1, -1, 2, -2, 4, 8, 16, 32, 64)
BUCKETS = (8, 16, 32, 64, 128, 512)
PAGES = (1, 4, 8, 16, 32, 64, 128)
MAX_CHANGED = 24
"""Inserted ids that are left out, and written twice, one at a time."""
MAX_CUT = 6
"""Inserted ids that are left out together."""
ADAPTER_SCALES = (2.0, 0.5, 4.0, 0.25)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One setting that the engine might have.

    Attributes:
        cause: what would be wrong.
        label: describes it, after the words "the engine".
        model: other hyperparameters.
        params: makes other weights.
        dtype: of products.
        prefix: makes the weights of stale ids.
        place: changes the row of a context.
        change: other tensors of one or two layers: the first of them, and a layer's tree [2, ...].
        mix: the tokens of a context before the change are those of the learner: it returns the
            first index after it.
    """

    cause: Cause
    label: str
    model: DecoderConfig | None = None
    params: Callable[[], Params] | None = None
    dtype: str | None = None
    prefix: Callable[[], Params] | None = None
    place: Callable[[Context, Row], Row] | None = None
    change: Callable[[], tuple[int, Params]] | None = None
    mix: Callable[[Context], int] | None = None

    @property
    def changes_places_only(self) -> bool:
        """Whether the model is the learner's, so that what comes before the first change need not be computed again."""
        others = (self.model, self.params, self.dtype, self.prefix, self.change, self.mix)
        return self.place is not None and not any(others)

    def _scores_since(
        self,
        subject: DiagnosisSubject,
        row: Row,
        first: int,
        plain: np.ndarray,
        activations: forward.Activations,
    ) -> np.ndarray:
        """Score a single context of which only ids from ``first`` on differ."""
        later = row.at > first
        if not later.any():
            return plain
        states = subject.hidden_since(row, first, activations)
        context = subject.contexts[0]
        supports = [context.supports[i] for i in np.flatnonzero(later)] if context.supports else []
        ids = np.asarray(context.token_ids)[context.at[later]]
        scores = plain.copy()
        scores[later] = logprobs(subject.weights(), states, ids, (subject.temperature,), supports)[
            0
        ]
        return scores

    def scores(
        self,
        subject: DiagnosisSubject,
        plain: Scores,
        activations: forward.Activations | None = None,
    ) -> Scores:
        """Score all contexts.

        Args:
            subject: of the diagnosis.
            plain: the learner's scores.
            activations: the learner's, of the contexts as they are; with them, layers before a
                :attr:`change` are not computed again.
        """
        if self.change is not None and activations is not None:
            first, tensors = self.change()
            weights = subject.weights()
            change = forward.LayerChange(
                before=activations.before(first), first=first, tensors=subject.weights(tensors)
            )
            return subject.split(
                subject.tokens(subject.hidden(weights=weights, change=change), weights).plain
            )
        rows = [Row.of(context) for context in subject.contexts]
        if self.place is not None:
            rows = [
                self.place(context, row)
                for context, row in zip(subject.contexts, rows, strict=True)
            ]
        if activations is not None and self.changes_places_only:
            first = rows[0].first_change(Row.of(subject.contexts[0]))
            first -= first % LENGTH  # what is computed again has one of few shapes
            return [self._scores_since(subject, rows[0], first, plain[0], activations)]
        params = None if self.params is None else self.params()
        if params is None and self.model is not None:
            params = fitted_params(subject.model, subject.params, self.model)
        weights = subject.weights(params, self.dtype)
        prefix = None if self.prefix is None else subject.weights(self.prefix(), self.dtype)
        hidden = subject.hidden(rows, model=self.model, weights=weights, prefix=prefix)
        scores = subject.split(subject.tokens(hidden, weights).plain)
        if self.mix is None:
            return scores
        mixed = []
        for context, own, other in zip(subject.contexts, plain, scores, strict=True):
            mixed.append(np.where(context.at < self.mix(context), own, other))
        return mixed


Trials = Generator[Trial, float, None]
"""Yields trials, and is sent the mean gap that each left."""
Family = Callable[[DiagnosisSubject], Trials]


def with_one_in_memory(
    older: Mapping[str, Callable[[], Params]],
) -> dict[str, Callable[[], Params]]:
    """Return makers of other versions' parameters that keep the latest ones they made: one version is in memory."""
    latest: dict[str, Params] = {}

    def make(name: str) -> Params:
        if name not in latest:
            latest.clear()
            latest[name] = older[name]()
        return latest[name]

    return {name: functools.partial(make, name) for name in older}


# --- weights of other versions --------------------------------------------------------------------


def stale_version(subject: DiagnosisSubject) -> Trials:
    """Try older weights: all of them, from a turn on, or those of the head alone."""
    for name, make in subject.older.items():
        yield Trial(cause=Cause.STALE_VERSION, label=f"serves the weights of {name}", params=make)
        for kind, where in _each_boundary(subject):
            if where > subject.contexts[0].prompt:
                yield Trial(
                    cause=Cause.STALE_VERSION,
                    label=(
                        f"serves the weights of {name} from"
                        f" {_describe_place(subject.contexts[0], where)} on"
                    ),
                    params=make,
                    mix=lambda context, kind=kind: _boundaries(context).get(kind, 0),
                )
        yield Trial(
            cause=Cause.STALE_VERSION,
            label=f"reads logits from a head that is still that of {name}",
            params=lambda make=make: subject.params | {"lm_head": head_of(make())},
        )


def adapter_scale(subject: DiagnosisSubject) -> Trials:
    """Try other scales of what was trained, where that is adapters over the model's files."""
    if not subject.adapters:
        return
    for name, make in subject.older.items():
        if "model's files" not in name:
            continue
        for scale in ADAPTER_SCALES:

            def scaled(make: Callable[[], Params] = make, scale: float = scale) -> Params:
                return jax.tree.map(
                    lambda base, own: base + scale * (own - base), make(), subject.params
                )

            label = f"applies the adapters with {scale:g} times their scale (alpha / rank)"
            yield Trial(cause=Cause.ADAPTER, label=label, params=scaled)


def stale_prefix(subject: DiagnosisSubject) -> Trials:
    """Try what came before a turn, or whole pages of it, with keys and values of older weights."""
    starts = subject.contexts[0].starts

    def is_inside_turn(boundary: tuple[str, int]) -> bool:
        """Return whether no request ended there: what is in the cache is what requests were made of."""
        return boundary[1] not in starts[1::2]

    boundaries = sorted(_each_boundary(subject), key=is_inside_turn)
    for name, make in subject.older.items():
        for (kind, end), page in itertools.product(boundaries, PAGES):

            def place(context: Context, row: Row, kind: str = kind, page: int = page) -> Row:
                end = _boundaries(context).get(kind)
                cached = 0 if end is None else (end - 1) // page * page
                return replace(row, stale=np.arange(len(row.token_ids)) < cached)

            if (end - 1) // page == 0:
                continue
            what = "prompts" if end <= subject.contexts[0].prompt else "earlier turns"
            label = f"reads {what} from a cache that the weights of {name} filled"
            yield Trial(cause=Cause.STALE_PREFIX, label=label, prefix=make, place=place)


# --- ids, positions, masks ------------------------------------------------------------------------


def _boundaries(context: Context) -> dict[str, int]:
    """Return where something may begin to go wrong, by kind, the likeliest first.

    ``layers``: the first id whose activations differ. ``stretch``: where the sampled or inserted
    ids begin that the first token that disagrees is among. ``before``: where those before them do.
    ``breach``: that token itself. ``page``: the roundest index after the last token that agrees,
    where a page may begin. ``prompt``: the first sampled id.
    """
    found: dict[str, int] = {}
    if context.differs_from is not None and context.differs_from < len(context.token_ids):
        found["layers"] = context.differs_from
    breach = int(context.at[-1]) + 1 if context.breach is None else context.breach
    starts = context.starts or (context.prompt,)
    near = [start for start in reversed(starts) if start <= breach]
    found |= dict(zip(("stretch", "before"), near, strict=False))
    agreeing = context.at[context.at < breach]
    if len(agreeing):
        found["breach"] = breach
        found["page"] = _roundest(int(agreeing[-1]) + 1, breach)
    found["prompt"] = context.prompt
    return found


def _roundest(begin: int, end: int) -> int:
    """Return the number from ``begin`` to ``end`` that is a multiple of the largest power of two."""
    step = 1
    while -(-begin // (2 * step)) * 2 * step <= end:
        step *= 2
    return -(-begin // step) * step


def _describe_place(context: Context, index: int, last: int = 0) -> str:
    """Return what begins at an index: ``turn 2``, ``what follows turn 1``, or ``id 240``; or ``last`` ids before."""
    starts = context.starts or (context.prompt,)
    if index not in starts:
        return f"id {index - last}"
    number = starts.index(index)
    return f"turn {number // 2 + 1}" if number % 2 == 0 else f"what follows turn {number // 2 + 1}"


def _at_boundary(
    kind: str, change: Callable[[Context, Row, int], Row]
) -> Callable[[Context, Row], Row]:
    """Return a change of rows at a boundary; contexts without it stay as they are."""

    def place(context: Context, row: Row) -> Row:
        index = _boundaries(context).get(kind)
        return row if index is None else change(context, row, index)

    return place


def _each_boundary(
    subject: DiagnosisSubject, *, only_starts: bool = False
) -> Iterator[tuple[str, int]]:
    """Yield the kind of each boundary, and where it is in the first context.

    Args:
        subject: whose contexts.
        only_starts: leave out those that no turn, and nothing inserted, begins at.
    """
    context = subject.contexts[0]
    seen = set()
    for kind, index in _boundaries(context).items():
        if index not in seen and (
            not only_starts or index in (context.starts or (context.prompt,))
        ):
            seen.add(index)
            yield kind, index


def token_drift(subject: DiagnosisSubject) -> Trials:
    """Try ids that tokenizers and templates add or omit, at the beginning of a context and between turns."""
    bos = subject.model.bos_token_id
    for kind, index in _each_boundary(subject, only_starts=True):
        context = subject.contexts[0]
        if index <= context.prompt:
            continue
        where = _describe_place(context, index)
        changes: dict[str, Callable[[Context, Row, int], Row]] = {
            f"saw no id before {where}": lambda context, row, at: _forget(row, at - 1, at),
            f"saw the id before {where} twice": lambda context, row, at: row.insert(
                at, [row.token_ids[at - 1]]
            ),
        }
        if bos is not None:
            changes[f"saw BOS (id {bos}) before {where}"] = lambda context, row, at: row.insert(
                at, [bos]
            )
        for eos in subject.model.eos_token_ids[:1]:
            changes[f"saw EOS (id {eos}) before {where}"] = lambda context, row, at, eos=eos: (
                row.insert(at, [eos])
            )
        for label, change in changes.items():
            yield Trial(cause=Cause.TOKEN_DRIFT, label=label, place=_at_boundary(kind, change))
    for kind, index in _each_boundary(subject, only_starts=True):
        yield from _changed_insertions(subject.contexts[0], kind, index)
    for count in (1, 2, 3, 4, 8):
        if all(count + 1 < context.prompt for context in subject.contexts):
            first = "id" if count == 1 else f"{count} ids"
            label = f"saw no first {first} of the context"
            yield Trial(
                cause=Cause.TOKEN_DRIFT,
                label=label,
                place=lambda c, row, count=count: row.drop(0, count),
            )
    label = "saw the context's first id (BOS) twice"
    yield Trial(
        cause=Cause.TOKEN_DRIFT,
        label=label,
        place=lambda c, row: row.insert(0, row.token_ids[:1].tolist()),
    )
    if bos is not None:
        label = f"saw BOS (id {bos}) before the context"
        yield Trial(cause=Cause.TOKEN_DRIFT, label=label, place=lambda c, row: row.insert(0, [bos]))


def _changed_insertions(first: Context, kind: str, index: int) -> Trials:
    """Try what was inserted after a turn, which begins at ``index``, without some of its ids or with one twice."""
    if index not in first.starts or first.starts.index(index) % 2 == 0:
        return
    what = _describe_place(first, index)
    length = _end_of_stretch(first, index) - index
    changes: dict[str, Callable[[Context, Row, int], Row]] = {}
    for number in range(min(length, MAX_CHANGED)):

        def without(context: Context, row: Row, at: int, number: int = number) -> Row:
            return _forget(row, at + number, at + number + 1)

        changes[f"saw {what} without its id {number + 1}"] = without
    for count in range(2, min(length, MAX_CUT + 1)):

        def beheaded(context: Context, row: Row, at: int, count: int = count) -> Row:
            return _forget(row, at, at + count)

        def cut(context: Context, row: Row, at: int, count: int = count) -> Row:
            end = _end_of_stretch(context, at)
            return _forget(row, end - count, end)

        changes[f"saw {what} without its first {count} ids"] = beheaded
        changes[f"saw {what} without its last {count} ids"] = cut
    changes[f"did not see {what}"] = lambda context, row, at: _forget(
        row, at, _end_of_stretch(context, at)
    )
    for number in range(min(length, MAX_CHANGED)):

        def twice(context: Context, row: Row, at: int, number: int = number) -> Row:
            return row.insert(at + number, [row.token_ids[at + number]])

        changes[f"saw {what} with its id {number + 1} twice"] = twice
    for label, change in changes.items():
        yield Trial(cause=Cause.TOKEN_DRIFT, label=label, place=_at_boundary(kind, change))


def _end_of_stretch(context: Context, begin: int) -> int:
    """Return where the sampled or inserted ids end that begin at an index."""
    return next((start for start in context.starts if start > begin), len(context.token_ids))


def _forget(row: Row, begin: int, end: int) -> Row:
    """Leave out ids; those that are compared are only hidden from what follows, whose positions are lower for it."""
    if not ((row.at >= begin) & (row.at < end)).any():
        return row.drop(begin, end)
    ends = row.ends.copy()
    ends[begin:end] = end
    positions = np.where(
        np.arange(len(row.token_ids)) >= end, row.positions - (end - begin), row.positions
    )
    return replace(row, ends=ends, positions=positions)


def padding(subject: DiagnosisSubject) -> Trials:
    """Try padding on the left, and where a turn begins, a few ids or as many as fill a bucket."""
    for pad in dict.fromkeys((*subject.pad_ids, *subject.model.eos_token_ids[:1])):
        for kind, index in _each_boundary(subject, only_starts=True):
            where = _describe_place(subject.contexts[0], index)
            if index <= subject.contexts[0].prompt:
                continue
            for count, shift in itertools.product((1, 2, 3, 4, 8), (True, False)):

                def place(
                    context: Context, row: Row, at: int, count: int = count, shift: bool = shift
                ) -> Row:
                    return row.insert(at, [pad] * count, shift_positions=shift)  # noqa: B023

                label = f"sees {_count(count, 'padding id')} ({pad}) before {where}"
                yield Trial(cause=Cause.PADDING, label=label, place=_at_boundary(kind, place))
            for size, shift in itertools.product(BUCKETS, (True, False)):

                def fill(
                    context: Context, row: Row, at: int, size: int = size, shift: bool = shift
                ) -> Row:
                    return row.insert(at, [pad] * _missing(at, size), shift_positions=shift)  # noqa: B023

                label = (
                    f"sees the padding ids ({pad}) that fill contexts up to {size} before {where}"
                )
                yield Trial(cause=Cause.PADDING, label=label, place=_at_boundary(kind, fill))
        for count in (1, 2, 3, 4, 6, 8, 16, 32, 64):
            label = f"sees {_count(count, 'padding id')} ({pad}) before the prompt"
            yield Trial(
                cause=Cause.PADDING,
                label=label,
                place=lambda c, row, n=count, pad=pad: row.insert(0, [pad] * n),
            )
        for size in BUCKETS:
            label = f"sees the padding ids ({pad}) that fill prompts up to {size}"

            def left(context: Context, row: Row, size: int = size, pad: int = pad) -> Row:
                return row.insert(0, [pad] * _missing(context.prompt, size))

            yield Trial(cause=Cause.PADDING, label=f"{label} from the left", place=left)
            for shift in (True, False):

                def between(
                    context: Context,
                    row: Row,
                    size: int = size,
                    pad: int = pad,
                    shift: bool = shift,
                ) -> Row:
                    ids = [pad] * _missing(context.prompt, size)
                    return row.insert(context.prompt, ids, shift_positions=shift)

                yield Trial(cause=Cause.PADDING, label=label, place=between)


def _missing(count: int, size: int) -> int:
    """Return how many ids fill a number of them up to a multiple of ``size``; 0 if too many to try."""
    missing = -count % size
    return missing if missing <= MAX_INSERTED else 0


def position(subject: DiagnosisSubject) -> Trials:
    """Try positions that are shifted, begin again or stand still from somewhere on, or only where ids are sampled."""
    first = subject.contexts[0]
    for kind, index in _each_boundary(subject):
        yield from _shifted(first, kind, index, OFFSETS[:4])
        for last in _lasts(kind):

            def restart(context: Context, row: Row, at: int, last: int = last) -> Row:
                later = np.arange(len(row.token_ids)) >= at - last
                return replace(
                    row, positions=np.where(later, row.positions - (at - last), row.positions)
                )

            label = f"lets positions begin again at 0 at {_describe_place(first, index, last)}"
            yield Trial(cause=Cause.POSITION, label=label, place=_at_boundary(kind, restart))
        if index > first.prompt and index in first.starts:
            before = first.starts[first.starts.index(index) - 1]
            label = f"does not count the positions of {_describe_place(first, before)}"
            yield Trial(cause=Cause.POSITION, label=label, place=_at_boundary(kind, _stand_still))
    for kind, index in _each_boundary(subject):
        yield from _shifted(first, kind, index, OFFSETS[4:])
    if len(first.starts) < 2:
        return
    for offset in OFFSETS:

        def only_sampled(context: Context, row: Row, offset: int = offset) -> Row:
            return replace(
                row, positions=np.where(_is_sampled(context), row.positions + offset, row.positions)
            )

        label = f"puts sampled tokens, and no others, {_describe_offset(offset)}"
        yield Trial(cause=Cause.POSITION, label=label, place=only_sampled)


def _lasts(kind: str) -> tuple[int, ...]:
    """Return how many ids before a boundary what is wrong may begin.

    Engines that prefill without a context's last id feed it like a sampled one. The first token
    that disagrees follows the id where it began.
    """
    if kind == "breach":
        return (1,)
    if kind in ("layers", "page"):
        return (0,)
    return (0, 1)


def _shifted(first: Context, kind: str, index: int, offsets: Sequence[int]) -> Trials:
    is_prompt = index <= first.prompt
    for offset, last in itertools.product(offsets, _lasts(kind)):

        def shift(
            context: Context, row: Row, at: int, offset: int = offset, last: int = last
        ) -> Row:
            later = np.arange(len(row.token_ids)) >= at - last
            return replace(row, positions=np.where(later, row.positions + offset, row.positions))

        what = "sampled tokens" if is_prompt else "ids"
        from_there = "" if is_prompt else f" from {_describe_place(first, index, last)} on"
        label = f"puts {what} {_describe_offset(offset)}{from_there}"
        yield Trial(cause=Cause.POSITION, label=label, place=_at_boundary(kind, shift))


def _describe_offset(offset: int) -> str:
    return f"{_count(abs(offset), 'position')} {'further' if offset > 0 else 'back'}"


def _stand_still(context: Context, row: Row, at: int) -> Row:
    starts = context.starts
    number = starts.index(at) if at in starts else 0
    count = at - starts[number - 1] if number else 0
    return replace(
        row,
        positions=np.where(
            np.arange(len(row.token_ids)) >= at, row.positions - count, row.positions
        ),
    )


def _is_sampled(context: Context) -> np.ndarray:
    """Return which ids are in sampled stretches, the id that each was sampled after included, bool [T]."""
    found = np.zeros(len(context.token_ids), bool)
    edges = [*context.starts, len(context.token_ids)]
    for begin, end in zip(edges[::2], edges[1::2], strict=False):
        found[max(begin - 1, 0) : end] = True
        found[end - 1 : end] = end == len(context.token_ids)  # fed with what was inserted after it
    return found


def mask(subject: DiagnosisSubject) -> Trials:
    """Try ids that are lost from the cache where a turn begins, and tokens that do not see themselves."""

    def themselves(context: Context, row: Row) -> Row:
        index = np.arange(len(row.token_ids))
        sampled = _is_sampled(context) & (index > 0)
        return replace(row, begins=np.where(sampled, index + 1, row.begins))

    yield Trial(
        cause=Cause.MASK,
        label="computes as if sampled tokens do not attend to themselves",
        place=themselves,
    )
    for kind, index in _each_boundary(subject):
        first = subject.contexts[0]
        where = _describe_place(first, index)
        starts = first.starts or (first.prompt,)
        number = starts.index(index) if index in starts else 0
        before = "the prompt" if not number else _describe_place(first, starts[number - 1])
        for last in (0, 1):

            def lost(context: Context, row: Row, at: int, last: int = last) -> Row:
                return _hide(row, at - 1 - last, at - last, at - last)

            label = f"computes as if the last id of {before} is not attended to"
            yield Trial(cause=Cause.MASK, label=label, place=_at_boundary(kind, lost))
        for last in (0, 1):

            def nothing(context: Context, row: Row, at: int, last: int = last) -> Row:
                return _hide(row, 0, at - last, at - last)

            label = f"computes as if nothing before {where} is attended to"
            yield Trial(cause=Cause.MASK, label=label, place=_at_boundary(kind, nothing))
        if number:
            label = f"computes as if {before} is not attended to later"
            yield Trial(cause=Cause.MASK, label=label, place=_at_boundary(kind, _hide_stretch))
        for page in PAGES[1:]:

            def lost_page(context: Context, row: Row, at: int, page: int = page) -> Row:
                return _hide(row, at // page * page, at, at)

            label = f"computes as if a page of {page} ids that {where} begins in is lost before it"
            yield Trial(cause=Cause.MASK, label=label, place=_at_boundary(kind, lost_page))


def _hide(row: Row, begin: int, end: int, since: int) -> Row:
    """Hide ids from those from ``since`` on."""
    index = np.arange(len(row.token_ids))
    hidden = (index >= begin) & (index < end)
    return replace(row, ends=np.where(hidden, np.minimum(row.ends, since), row.ends))


def _hide_stretch(context: Context, row: Row, at: int) -> Row:
    number = context.starts.index(at) if at in context.starts else 0
    return _hide(row, context.starts[number - 1], at, at) if number else row


# --- numbers of the config ------------------------------------------------------------------------


def settings_of(cause: Cause) -> Family:
    """Return the family of all fields of the config whose other values would have this cause."""

    def family(subject: DiagnosisSubject) -> Trials:
        longest = subject.longest or max(len(context.token_ids) for context in subject.contexts)
        fields = [field for field in config_fields(subject.model) if _cause_of(field) is cause]
        left: dict[str, dict[float, float]] = {}
        for kind in ("usual", "derived"):
            for field in fields:
                values = [
                    value for value in getattr(field, kind) if _has_effect(field, value, longest)
                ]
                for value in values:
                    trial = _setting(subject, cause, field, value)
                    if trial is None:
                        continue
                    gap = yield trial
                    if field.is_number and isinstance(value, float):
                        left.setdefault(field.path, {})[value] = gap
        if cause is Cause.ROTARY and subject.model.local_rope is not None:
            yield _exchanged_ropes(subject.model)
        yield from _between(subject, cause, fields, left)

    return family


def _cause_of(field: ConfigField) -> Cause:
    root = field.path.partition(".")[0]
    if root in ("rope", "local_rope"):
        return Cause.ROTARY
    if root in ("sliding_window", "windowed_layers"):
        return Cause.WINDOW
    return Cause.EXPERTS if root == "experts" else Cause.SETTING


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
    left: dict[str, dict[float, float]],
) -> Trials:
    """Try values between those of the number that left least, if it left less than there was."""
    best = {path: min(gaps.values()) for path, gaps in left.items()}
    if not best:
        return
    path = min(best, key=lambda path: best[path])
    if best[path] > GAIN * subject.gap or best[path] <= OVER * subject.gap:
        return
    field = next(field for field in fields if field.path == path)
    known = {float(field.value): subject.gap, **left[path]}
    for _ in range(8):
        tried = sorted(value for value in known if value > 0)
        at = tried.index(min(tried, key=lambda value: known[value]))
        ends = [tried[max(at - 1, 0)], tried[at], tried[min(at + 1, len(tried) - 1)]]
        for low, high in itertools.pairwise(ends):
            for share in (1 / 3, 2 / 3):
                value = float(low ** (1 - share) * high**share)
                trial = _setting(subject, cause, field, value) if value not in known else None
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
            pairs = "neighbouring numbers, not halves of a head"
            return (
                f"rotates {pairs}"
                if value
                else "rotates halves of a head, not neighbouring numbers"
            )
        case "sliding_window":
            return f"has {_describe_window(model, changed)}"
        case "windowed_layers":
            return f"has {_describe_windowed(value)}"
        case "experts.per_token":
            assert model.experts is not None
            return (
                f"takes {_count(value, 'expert')} a token (the model has {model.experts.per_token})"
            )
        case "experts.normalize":
            return f"takes experts with weights{'' if value else ' not'} normalized"
    right_value = field.value
    if field.path == "attention_scale":  # None stands for a number
        right_value = model.score_scale
        value = changed.score_scale
    return (
        f"computes with {field.path}={_describe_value(value)}, not {_describe_value(right_value)}"
    )


def _describe_value(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _describe_window(model: DecoderConfig, changed: DecoderConfig) -> str:
    if changed.sliding_window is None:
        return "no window at all"
    if model.sliding_window is None or not any(model.windowed_layers):
        return f"a window of {changed.sliding_window}, the model has none"
    return f"a window of {changed.sliding_window}, not {model.sliding_window}"


def _describe_windowed(layers: Sequence[bool]) -> str:
    if not any(layers):
        return "no window at all"
    return "the window in every layer" if all(layers) else "the window in other layers"


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
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


# --- precision ------------------------------------------------------------------------------------


def dtype(subject: DiagnosisSubject) -> Trials:
    """Try weights alone, or all products, in a coarser dtype."""
    for name in ROUNDED:
        if name != subject.dtype:

            def cast(name: str = name) -> Params:
                return jax.tree.map(lambda x: x.astype(name).astype(x.dtype), subject.params)

            yield Trial(cause=Cause.DTYPE, label=f"rounds weights to {name}", params=cast)
            yield Trial(cause=Cause.DTYPE, label=f"computes in {name}", dtype=name)
    for name in DTYPES:
        params = functools.partial(_params_in_8_bits, subject, name)
        yield Trial(cause=Cause.DTYPE, label=f"rounds weights to {name}", params=params)


def weights_in(subject: DiagnosisSubject, precision: str) -> Params | None:
    """Return the learner's weights as they enter products in a coarser precision; None if there is no such dtype."""
    if precision in DTYPES:
        return subject.weights(_params_in_8_bits(subject, precision))
    if precision in ROUNDED and precision != subject.dtype:
        return subject.weights(dtype=precision)
    return None


def _params_in_8_bits(subject: DiagnosisSubject, name: str) -> Params:
    layers = {}
    for key, x in subject.params["layers"].items():
        is_matrix = parameter_at(["layers", key]).is_matrix
        layers[key] = _round_to_8_bits(x, DTYPES[name]) if is_matrix else x
    return subject.params | {"layers": layers}


def _round_to_8_bits(x: jax.Array, kind: Any) -> jax.Array:
    kept: Quantized = quantized(x, kind, axis=-1)
    return (kept.numbers.astype(jnp.float32) * kept.scale).astype(x.dtype)


# --- tensors --------------------------------------------------------------------------------------


def tensors_of_all_layers(subject: DiagnosisSubject) -> Trials:
    """Try tensors that are missing, exchanged or transposed in every layer, and layers in another order."""
    params = subject.params
    layers = params["layers"]
    names = _LayerNames(subject.model)

    def change(cause: Cause, label: str, make: Callable[[], dict[str, jax.Array]]) -> Trial:
        return Trial(cause=cause, label=label, params=lambda: params | {"layers": layers | make()})

    for one, other in names.pairs():
        label = (
            f"holds {names.any(one)} and {names.any(other)} in each other's place in every layer"
        )
        exchanged = {one: layers[other], other: layers[one]}
        yield change(Cause.MISNAMED_TENSOR, label, lambda exchanged=exchanged: exchanged)
    for key, x in layers.items():
        if x.shape[-1] == x.shape[-2] and parameter_at(["layers", key]).is_matrix:
            label = f"holds {names.any(key)} transposed in every layer"
            yield change(
                Cause.TRANSPOSED_TENSOR, label, lambda key=key, x=x: {key: x.swapaxes(-1, -2)}
            )
    for order, make in _head_orders(subject.model, layers).items():
        yield change(Cause.MISNAMED_TENSOR, f"computes as if {order}", make)
    for key, x in layers.items():
        label = f"has no {names.any(key)} in any layer"
        yield change(
            Cause.MISSING_TENSOR, label, lambda key=key, x=x: {key: _blank(subject.model, key, x)}
        )
    for step, what in ((1, "holds the one before it"), (-1, "holds the one after it")):
        label = f"has the layers in another order: each layer {what}"
        rolled = lambda step=step: {key: jnp.roll(x, step, axis=0) for key, x in layers.items()}  # noqa: E731
        yield change(Cause.MISNAMED_TENSOR, label, rolled)


def tensors_of_one_layer(layers: Sequence[int]) -> Family:
    """Return the family of one wrong tensor in one of these layers; later ones are cheaper, and come first."""

    def family(subject: DiagnosisSubject) -> Trials:
        model = subject.model
        names = _LayerNames(model)
        stacked = subject.params["layers"]
        for layer in sorted(layers, reverse=True):
            pair = [layer, min(layer + 1, model.num_layers - 1)]

            def trial(
                cause: Cause,
                label: str,
                change: Callable[[Params], Params],
                pair: Sequence[int] = pair,
            ) -> Trial:
                def tensors() -> tuple[int, Params]:
                    both = {key: x[jnp.asarray(pair)] for key, x in stacked.items()}
                    return pair[0], both | change(both)

                return Trial(
                    cause=cause,
                    label=label,
                    change=tensors,
                    params=lambda: _with_layers(subject, *tensors()),
                )

            for key in stacked:
                kept = {
                    key: lambda both, key=key: _first(both[key], _blank(model, key, both[key][0]))
                }
                label = f"has no {names.one(key, layer)}"
                yield trial(
                    Cause.MISSING_TENSOR,
                    label,
                    lambda both, kept=kept: {k: f(both) for k, f in kept.items()},
                )
            label = f"leaves out layer {layer}"
            outputs = [
                key
                for key in ("o", "down", "expert_down", "o_bias", "expert_down_bias")
                if key in stacked
            ]
            yield trial(
                Cause.MISSING_TENSOR,
                label,
                lambda both, outputs=outputs: {
                    key: _first(both[key], both[key][0] * 0) for key in outputs
                },
            )
            for one, other in names.pairs():
                label = (
                    f"holds {names.one(one, layer)} and {names.one(other, layer)} in each other's"
                    " place"
                )

                def exchange(both: Params, one: str = one, other: str = other) -> Params:
                    return {
                        one: _first(both[one], both[other][0]),
                        other: _first(both[other], both[one][0]),
                    }

                yield trial(Cause.MISNAMED_TENSOR, label, exchange)
            for key, x in stacked.items():
                if x.shape[-1] == x.shape[-2] and parameter_at(["layers", key]).is_matrix:
                    label = f"holds {names.one(key, layer)} transposed"
                    yield trial(
                        Cause.TRANSPOSED_TENSOR,
                        label,
                        lambda both, key=key: {
                            key: _first(both[key], both[key][0].swapaxes(-1, -2))
                        },
                    )
                if parameter_at(["layers", key]).is_of_experts:
                    label = (
                        f"holds the experts of {names.one(key, layer)} in another order (the last"
                        " one first)"
                    )
                    yield trial(
                        Cause.MISNAMED_TENSOR,
                        label,
                        lambda both, key=key: {key: _first(both[key], both[key][0][::-1])},
                    )
                if layer + 1 < model.num_layers:
                    label = (
                        f"holds {names.one(key, layer)} and {names.one(key, layer + 1)} in each"
                        " other's place"
                    )
                    yield trial(
                        Cause.MISNAMED_TENSOR, label, lambda both, key=key: {key: both[key][::-1]}
                    )

    return family


def _first(both: jax.Array, value: jax.Array) -> jax.Array:
    """Return the tensors of two layers with another one in the first."""
    return both.at[0].set(value)


def _with_layers(subject: DiagnosisSubject, first: int, tensors: Params) -> Params:
    """Return all parameters with those of one layer and the next replaced."""
    count = min(2, subject.model.num_layers - first)
    layers = subject.params["layers"]
    changed = {
        key: x.at[first : first + count].set(tensors[key][:count]) for key, x in layers.items()
    }
    return subject.params | {"layers": changed}


def _blank(model: DecoderConfig, key: str, x: jax.Array) -> jax.Array:
    """Return a tensor as it is before anything is loaded: norms the identity, all others zeros."""
    if parameter_at(["layers", key]).kind is Kind.NORM and not model.norm_offset:
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
    turns = np.arange(heads).reshape(heads // kv_heads, kv_heads).T.reshape(-1)
    places = (turns[:, None] * model.head_dim + np.arange(model.head_dim)).reshape(-1)

    def taking_turns() -> dict[str, jax.Array]:
        changed = {"q": layers["q"][:, places], "o": layers["o"][:, :, places]}
        if "q_bias" in layers:
            changed["q_bias"] = layers["q_bias"][:, places]
        if "sinks" in layers:
            changed["sinks"] = layers["sinks"][:, turns]
        return changed

    return {"query heads take turns among the key/value heads": taking_turns}


class _LayerNames:
    """Published names of the tensors of layers."""

    def __init__(self, model: DecoderConfig) -> None:
        self._names = tensor_names(model)["layers"]
        self._shapes = model.layer_shapes()

    def one(self, key: str, layer: int) -> str:
        """Return the name of one layer's tensor, or of the first of its experts."""
        found = self._names[key][layer]
        return f"{found[0]} and the other experts'" if isinstance(found, list) else str(found)

    def any(self, key: str) -> str:
        """Return the name without the layer."""
        found = self._names[key][0]
        name = str(found[0] if isinstance(found, list) else found)
        return name.partition("layers.0.")[2] or name

    def pairs(self) -> list[tuple[str, str]]:
        """Return the parameters of a layer that can be exchanged."""
        keys = list(self._shapes)
        return [
            (a, b) for a, b in itertools.combinations(keys, 2) if self._shapes[a] == self._shapes[b]
        ]


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
"""In the order in which they are tried, unless something speaks for others."""
PER_CONTEXT = frozenset(
    {Cause.STALE_PREFIX, Cause.POSITION, Cause.PADDING, Cause.TOKEN_DRIFT, Cause.MASK}
)
"""Causes whose best trial is chosen for each context."""
