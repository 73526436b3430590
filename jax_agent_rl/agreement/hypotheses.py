"""Settings under which the learner's model might reproduce the engine's log-probs; each attempt scores all contexts.

A hypothesis is right if one of its attempts leaves nothing unexplained. What differs from context to context (how much
padding, how long a cached prefix) may be chosen for each; what does not (a temperature) is one number for all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_agent_rl.agreement import forward
from jax_agent_rl.agreement.report import Cause
from jax_agent_rl.agreement.subject import MAX_INSERTED, Context, DiagnosisSubject, Scores
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

MATRICES = frozenset({"q", "k", "v", "o", "gate", "up", "down", "expert_gate", "expert_up", "expert_down"})
"""Parameters of a layer that engines keep in 8 bits."""
THETAS = (1e3, 1e4, 1e5, 2.5e5, 5e5, 1e6, 5e6, 1e7)
THETA_GAIN = 0.95
"""Share of the gap that a rotary base may leave for others near it to be tried."""
BUCKETS = (8, 16, 32, 64, 128, 512)
SEARCH_LEN = 96
"""Ids of the one context that all tensors are tried on."""


@dataclass(frozen=True)
class Attempt:
    """Log-probs under one setting, which ``label`` describes after the words "the engine"."""

    label: str
    scores: Scores


Attempts = Iterator[Attempt]


def token_drift(subject: DiagnosisSubject) -> Attempts:
    """Try ids that tokenizers and templates add or omit at the beginning of a context."""
    for count in (1, 2, 3, 4, 8):
        if all(count + 1 < context.prompt for context in subject.contexts):
            rows = [
                replace(row, token_ids=row.token_ids[count:], positions=row.positions[:-count], at=row.at - count)
                for row in subject.rows
            ]
            first = "id" if count == 1 else f"{count} ids"
            yield Attempt(f"saw no first {first} of the context", subject.score(rows))
    rows = [row.insert(0, row.token_ids[:1].tolist()) for row in subject.rows]
    yield Attempt("saw the context's first id (BOS) twice", subject.score(rows))
    if (bos := subject.model.bos_token_id) is not None:
        rows = [row.insert(0, [bos]) for row in subject.rows]
        yield Attempt(f"saw BOS (id {bos}) before the context", subject.score(rows))


def padding(subject: DiagnosisSubject) -> Attempts:
    """Try padding on the left, and between prompt and response for prompts padded to a bucket."""
    for pad in dict.fromkeys((*subject.pad_ids, *subject.model.eos_token_ids[:1])):
        for count in (1, 2, 3, 4, 6, 8, 16, 32, 64):
            rows = [row.insert(0, [pad] * count) for row in subject.rows]
            yield Attempt(f"sees {_count(count, 'padding id')} ({pad}) before the prompt", subject.score(rows))
        for size in BUCKETS:
            both = zip(subject.rows, subject.contexts, strict=True)
            rows = [row.insert(0, [pad] * _padding_length(context, size)) for row, context in both]
            label = f"sees the padding ids ({pad}) that fill prompts up to {size}"
            yield Attempt(f"{label} from the left", subject.score(rows))
            for shift in (True, False):
                rows = [
                    row.insert(c.prompt, [pad] * _padding_length(c, size), shift_positions=shift)
                    for row, c in zip(subject.rows, subject.contexts, strict=True)
                ]
                yield Attempt(label, subject.score(rows))


def _padding_length(context: Context, size: int) -> int:
    """Return how many ids fill a prompt up to a multiple of ``size``; 0 if too many to try."""
    missing = -context.prompt % size
    return missing if missing <= MAX_INSERTED else 0


def position(subject: DiagnosisSubject) -> Attempts:
    """Try sampled tokens at shifted positions, and log-probs returned with a neighbouring token."""
    for offset in (1, -1, 2, -2, 4, 8, 16, 32, 64):
        for last in (0, 1):  # engines that prefill without the prompt's last id feed it like a sampled one
            rows = []
            for row, context in zip(subject.rows, subject.contexts, strict=True):
                later = np.arange(len(row.token_ids)) >= context.prompt - last
                rows.append(replace(row, positions=(row.positions + offset * later).astype(np.int32)))
            label = f"puts sampled tokens {_count(abs(offset), 'position')} {'further' if offset > 0 else 'back'}"
            yield Attempt(label, subject.score(rows))
    plain = subject.score()
    for step, name in ((1, "after"), (-1, "before")):
        shifted = [np.roll(own, -step) for own in plain]
        for own, context in zip(shifted, subject.contexts, strict=True):
            own[-1 if step > 0 else 0] = context.rollout[-1 if step > 0 else 0]  # nothing to compare it with
        yield Attempt(f"returns with each token the log-prob of the one {name} it", shifted)


def temperature(subject: DiagnosisSubject) -> Attempts:
    """Try temperatures, first coarsely, then around the best one; and log-probs before temperature."""
    hidden, ids = subject.hidden(), np.concatenate(subject.ids)
    rollout = np.concatenate([c.rollout for c in subject.contexts])
    tried = np.geomspace(0.1, 10, 41) * subject.temperature
    for _ in range(4):
        scores = forward.logprobs(subject.params, hidden, ids, tried, subject.supports)
        best = int(np.argmin(np.abs(rollout - scores).mean(axis=1)))
        found, found_scores = float(tried[best]), scores[best]
        tried = np.geomspace(tried[max(best - 1, 0)], tried[min(best + 1, len(tried) - 1)], 41)
    if abs(found / subject.temperature - 1) > 1e-3:
        raw = " from before it is applied" if abs(found - 1) < 1e-3 else ""
        label = f"reports log-probs{raw} (of temperature {found:.3g}, not {subject.temperature:.3g})"
        yield Attempt(label, subject.split(found_scores))


def truncated_support(subject: DiagnosisSubject) -> Attempts:
    """Try top-k and top-p; each makes sampled ids likelier, by the mass that was kept."""
    hidden = subject.hidden()
    plain = np.concatenate(subject.score())
    rollout = np.concatenate([c.rollout for c in subject.contexts])
    mass = np.exp(np.minimum(plain - rollout, 0.0))
    ks = np.array([1, 2, 3, 4, 5, 8, 10, 16, 20, 32, 40, 50, 64, 100])
    estimated = forward.sorted_mass(subject.params, hidden, subject.temperature, ks, mass)
    count = int(np.median(estimated[-3][mass < 1 - 1e-4])) if (mass < 1 - 1e-4).any() else 0
    ks = np.append(ks, [count] if count else [])
    *by_k, _, reached, below = forward.sorted_mass(subject.params, hidden, subject.temperature, ks, mass)
    for k, kept in zip(ks, by_k, strict=True):
        label = f"samples from the {int(k)} likeliest ids (top_k={int(k)})"
        yield Attempt(label, subject.split(plain - np.log(kept)))
    low, high = float(below.max()), float(reached.min())
    if low < high < 1:
        label = f"samples from a nucleus (top_p between {low:.3g} and {high:.3g})"
        yield Attempt(label, subject.split(plain - np.log(reached)))


def stale_version(subject: DiagnosisSubject) -> Attempts:
    """Try older weights."""
    for name, make in subject.older.items():
        yield Attempt(f"serves the weights of {name}", subject.score(params=make()))


def stale_prefix(subject: DiagnosisSubject) -> Attempts:
    """Try prompts, or whole pages of them, with keys and values of older weights."""
    for name, make in subject.older.items():
        older = make()
        for page in (1, 4, 8, 16, 32, 64, 128):
            both = zip(subject.rows, subject.contexts, strict=True)
            rows = [replace(row, stale=(context.prompt - 1) // page * page) for row, context in both]
            if any(row.stale for row in rows):
                label = f"reads prompts from a cache that the weights of {name} filled"
                yield Attempt(label, subject.score(rows, prefix=older))


def dtype(subject: DiagnosisSubject) -> Attempts:
    """Try weights alone, or all products, in a coarser dtype."""
    for name in ("bfloat16", "float16"):
        if name != subject.dtype:
            cast = jax.tree.map(lambda x: x.astype(name).astype(x.dtype), subject.params)  # noqa: B023
            yield Attempt(f"rounds weights to {name}", subject.score(params=cast))
            yield Attempt(f"computes in {name}", subject.score(dtype=name))

    def round_to_8_bits(x: jax.Array, kind: jnp.dtype) -> jax.Array:
        kept: Quantized = quantized(x, kind, axis=-1)
        return (kept.numbers.astype(jnp.float32) * kept.scale).astype(x.dtype)

    layers = subject.params["layers"]
    for name, kind in DTYPES.items():
        rounded = {key: round_to_8_bits(x, kind) if key in MATRICES else x for key, x in layers.items()}
        params = subject.params | {"layers": rounded}
        yield Attempt(f"rounds weights to {name}", subject.score(params=params))


def rotary(subject: DiagnosisSubject) -> Attempts:
    """Try other bases (of known models, then the best fit), other scalings, the other layout of pairs."""
    model = subject.model
    others = [replace(model.rope, scaling=None), replace(model.rope, theta=10_000.0, scaling=None)]
    others += [replace(model.rope, scaling=LinearScaling(factor=f)) for f in (2.0, 4.0, 8.0)]
    llama = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    others += [replace(model.rope, scaling=Llama3Scaling(factor=f, **llama)) for f in (8.0, 32.0)]
    for rope in others:
        if rope != model.rope:
            yield Attempt(f"rotates by {_describe_rope(rope)}", subject.score(model=replace(model, rope=rope)))
    if model.local_rope is not None:
        local, full = model.local_rope, model.rope
        for name, settings in {
            "by the full layers' settings everywhere": {"local_rope": full},
            "by the windowed layers' settings everywhere": {"rope": local},
            "full and windowed layers by each other's settings": {"rope": local, "local_rope": full},
        }.items():
            yield Attempt(f"rotates {name}", subject.score(model=replace(model, **settings)))
    pairs = subject.score(params=_interleaved(model, subject.params))
    yield Attempt("rotates neighbouring numbers, not halves of a head", pairs)
    yield from _rotary_bases(subject)


def _rotary_bases(subject: DiagnosisSubject) -> Attempts:
    model = subject.model

    def at(theta: float) -> Attempt:
        rope = replace(model.rope, theta=float(theta))
        return Attempt(f"rotates by {_describe_rope(rope)}", subject.score(model=replace(model, rope=rope)))

    def mean(attempt: Attempt) -> float:
        return subject.compare(attempt.scores).mean

    tried = sorted({*THETAS, model.rope.theta * 10, model.rope.theta / 10} - {model.rope.theta})
    attempts = [at(theta) for theta in tried]
    yield from attempts
    best = int(np.argmin([mean(attempt) for attempt in attempts]))
    low, high = tried[max(best - 1, 0)], tried[min(best + 1, len(tried) - 1)]
    if mean(attempts[best]) > THETA_GAIN * subject.compare(subject.score()).mean:
        return
    for _ in range(6):
        between = np.geomspace(low, high, 6)
        attempts = [at(theta) for theta in between]
        best = int(np.argmin([mean(attempt) for attempt in attempts]))
        low, high = between[max(best - 1, 0)], between[min(best + 1, len(between) - 1)]
    yield attempts[best]


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
    return f"theta={rope.theta:.4g} and {scaling}"


def _interleaved(model: DecoderConfig, params: Params) -> Params:
    """Return weights with which halves rotate as neighbours did before."""
    order = np.concatenate([np.arange(0, model.head_dim, 2), np.arange(1, model.head_dim, 2)])

    def reordered(x: jax.Array) -> jax.Array:
        by_head = x.reshape(x.shape[0], -1, model.head_dim, *x.shape[2:])
        return by_head[:, :, order].reshape(x.shape)

    names = ("q", "k", "q_bias", "k_bias", "q_norm", "k_norm")
    layers = {name: reordered(x) if name in names else x for name, x in params["layers"].items()}
    return params | {"layers": layers}


def window(subject: DiagnosisSubject) -> Attempts:
    """Try no window, another one, or the window in other layers."""
    model = subject.model
    count, longest = model.num_layers, max(len(c.token_ids) for c in subject.contexts)
    everywhere = (True,) * count
    if model.windowed_layers and model.sliding_window is not None:
        own, size = model.windowed_layers, model.sliding_window
        others = [f for f in (size - 1, size + 1, size // 2, size * 2) if f > 0]
        settings: list[tuple[str, dict[str, Any]]] = [("no window at all", {"sliding_window": 2 * longest})]
        settings += [(f"a window of {f}, not {size}", {"sliding_window": f}) for f in others]
        turned = {tuple(own[-i:] + own[:-i]) for i in range(1, count)} - {own}
        settings += [("the window in other layers", {"windowed_layers": which}) for which in sorted(turned)[:8]]
        settings += [("the window in every layer", {"windowed_layers": everywhere})]
    else:
        local = {"windowed_layers": everywhere, "local_rope": None}
        sizes = [n for n in (*(2**i for i in range(1, 16)), *(2**i - 1 for i in range(3, 16))) if n < longest]
        settings = [(f"a window of {n}, the model has none", {"sliding_window": n, **local}) for n in sizes]
    for name, changed in settings:
        yield Attempt(f"has {name}", subject.score(model=replace(model, **changed)))


def experts(subject: DiagnosisSubject) -> Attempts:
    """Try another number of experts per token, or other expert weights."""
    own = subject.model.experts
    if own is None:
        return
    counts = {1, 2, 4, 8, own.per_token - 1, own.per_token + 1} - {0, own.per_token}
    for normalize in (own.normalize, not own.normalize):
        for per_token in sorted(n for n in counts | {own.per_token} if n <= own.count):
            changed = replace(own, per_token=per_token, normalize=normalize)
            if changed != own:
                what = f"{_count(per_token, 'expert')} a token (the model has {own.per_token})"
                weights = "" if normalize == own.normalize else f", weights{'' if normalize else ' not'} normalized"
                scores = subject.score(model=replace(subject.model, experts=changed))
                yield Attempt(f"takes {what}{weights}", scores)


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


HYPOTHESES: dict[Cause, Callable[[DiagnosisSubject], Attempts]] = {
    Cause.TEMPERATURE: temperature,
    Cause.TRUNCATED_SUPPORT: truncated_support,
    Cause.STALE_VERSION: stale_version,
    Cause.STALE_PREFIX: stale_prefix,
    Cause.TOKEN_DRIFT: token_drift,
    Cause.POSITION: position,
    Cause.PADDING: padding,
    Cause.ROTARY: rotary,
    Cause.WINDOW: window,
    Cause.EXPERTS: experts,
    Cause.DTYPE: dtype,
}
"""In the order in which they are tried, cheap ones first. A model without such settings makes no attempts."""
PER_CONTEXT = frozenset({Cause.STALE_PREFIX, Cause.POSITION, Cause.PADDING})
"""Causes whose best attempt is chosen for each context."""


def tensor_search(subject: DiagnosisSubject) -> Iterator[tuple[Cause, Attempt]]:
    """Search for one wrong tensor in an engine that cannot be inspected.

    Each tensor is zeroed, exchanged or transposed in the learner's model and scored on a short context; the three best
    changes are tried on all contexts.
    """
    first = min(subject.contexts, key=lambda context: int(context.at[0]))
    short = replace(subject, contexts=[first.cut(max(SEARCH_LEN, int(first.at[0]) + 8))])
    tried = [(short.compare(short.score(params=p)).mean, label) for _, label, p in _changes(subject)]
    best = {label for _, label in sorted(tried)[:3]}
    for cause, label, params in _changes(subject):
        if label in best:
            yield cause, Attempt(label, subject.score(params=params))


def _changes(subject: DiagnosisSubject) -> Iterator[tuple[Cause, str, Params]]:
    params, layers = subject.params, subject.params["layers"]
    names, count = tensor_names(subject.model), subject.model.num_layers

    def changed(key: str, i: int, value: jax.Array) -> Params:
        return params | {"layers": layers | {key: layers[key].at[i].set(value)}}

    def name(key: str, i: int) -> str:
        found = names["layers"][key][i]
        return f"{found[0]} and the other experts'" if isinstance(found, list) else str(found)

    for key, i in itertools.product(layers, range(count)):
        own = layers[key][i]
        yield Cause.MISSING_TENSOR, f"has no {name(key, i)}", changed(key, i, own * 0)
        if own.ndim == 2 and own.shape[0] == own.shape[1]:
            yield Cause.TRANSPOSED_TENSOR, f"holds {name(key, i)} transposed", changed(key, i, own.T)
        if i + 1 < count:
            both = layers | {key: layers[key].at[i].set(layers[key][i + 1]).at[i + 1].set(own)}
            label = f"holds {name(key, i)} and {name(key, i + 1)} in each other's place"
            yield Cause.MISNAMED_TENSOR, label, params | {"layers": both}
    for one, other in itertools.combinations(layers, 2):
        if layers[one].shape == layers[other].shape:
            for i in range(count):
                a, b = layers[one], layers[other]
                both = layers | {one: a.at[i].set(b[i]), other: b.at[i].set(a[i])}
                label = f"holds {name(one, i)} and {name(other, i)} in each other's place"
                yield Cause.MISNAMED_TENSOR, label, params | {"layers": both}
    if "lm_head" in params:
        tied = params | {"lm_head": params["embed"]}
        yield Cause.MISNAMED_TENSOR, "reads logits from the embeddings, not lm_head.weight", tied
