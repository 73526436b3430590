"""Which tensor is wrong in an engine that cannot be looked into: each one is taken away, exchanged or transposed in the
learner's model, until that says what the engine said.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import jax

from jax_agent_rl.agreement.causes import Cause
from jax_agent_rl.agreement.hypotheses import Attempt
from jax_agent_rl.agreement.subject import DiagnosisSubject
from jax_agent_rl.models.config import Params
from jax_agent_rl.models.hf import tensor_names

SHORT = 96
"""Ids of the one context that all tensors are tried on."""


def tensor_search(subject: DiagnosisSubject) -> Iterator[tuple[Cause, Attempt]]:
    """The three changes of each tensor that leave least unexplained of a short context, tried on all contexts."""
    first = min(subject.contexts, key=lambda context: int(context.at[0]))
    short = replace(subject, contexts=[first.cut(max(SHORT, int(first.at[0]) + 8))])
    tried = [(short.compare(short.score(params=p)).mean, label) for _, label, p in _changes(subject)]
    best = {label for _, label in sorted(tried)[:3]}
    for cause, label, params in _changes(subject):
        if label in best:
            yield cause, Attempt(label=label, scores=subject.score(params=params))


def _changes(subject: DiagnosisSubject) -> Iterator[tuple[Cause, str, Params]]:
    params, layers = subject.params, subject.params["layers"]
    names, count = tensor_names(subject.model), subject.model.num_layers

    def changed(key: str, i: int, value: jax.Array) -> Params:
        return params | {"layers": layers | {key: layers[key].at[i].set(value)}}

    def name(key: str, i: int) -> str:
        found = names["layers"][key][i]
        return found if isinstance(found, str) else f"{found[0]} and the other experts'"

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
