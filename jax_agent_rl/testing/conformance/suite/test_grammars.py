"""Outputs under a grammar: what they are, the log-probs of their ids, and what their ids were drawn from."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from jax_agent_rl.errors import BackendError
from jax_agent_rl.testing.conformance.probe import CheckFailed, Probe
from jax_agent_rl.testing.conformance.reference import log_softmax, predictions
from jax_agent_rl.testing.conformance.runner import check
from jax_agent_rl.testing.conformance.suite.test_replay import supported
from jax_agent_rl.types import TokenOutput

_LEAST, _MOST = 2, 6
_WORD = re.compile("[a-z]+")
_GRAMMAR = f"start: /[a-z]{{{_LEAST},{_MOST}}}/"


@check("grammars")
async def test_grammars(probe: Probe) -> None:
    """Under a grammar every output is one of its texts, and log-probs are those of what it left, which is reported."""
    decode = _decoder(probe)
    prompt = probe.prompt(12, seed=60)
    texts = [decode([token]) for token in range(probe.subject.vocab_size)]
    for seed in range(4):
        output = await probe.generate(
            prompt, max_tokens=_MOST + 1, temperature=1.0, seed=seed, grammar=_GRAMMAR, ignore_eos=False
        )
        words = [token for token in output.token_ids if token not in probe.subject.eos_ids]
        text = decode(words)
        if not (_WORD.fullmatch(text) and _LEAST <= len(text) <= _MOST and len(words) < len(output.token_ids)):
            cause = "the grammar is ignored, or advanced by other ids than those that are returned"
            raise CheckFailed(
                f"an output under {_GRAMMAR}", expected="such a word, then EOS", got=repr(text), cause=cause
            )
        _assert_distribution(probe, prompt, output, texts)


@check("grammars")
async def test_wrong_grammars_refused(probe: Probe) -> None:
    """A grammar that cannot be compiled raises a BackendError for this request alone."""
    prompt = probe.prompt(9, seed=61)
    beside = probe.begin(prompt, max_tokens=16)
    what = "a grammar that names a rule it does not have"
    wrong = probe.generate(prompt, grammar="start: nothing", ignore_eos=False)
    await probe.raises(BackendError, wrong, what, cause="it is compiled where a failure ends the engine, or ignored")
    probe.assert_greedy(prompt, await beside, "a request beside it", cause="the mask of another request is applied")


def _decoder(probe: Probe) -> Callable[[Sequence[int]], str]:
    if probe.subject.decode_text is None:
        pytest.skip("the suite was given no tokenizer to decode with")
    return probe.subject.decode_text


def _assert_distribution(probe: Probe, prompt: Sequence[int], output: TokenOutput, texts: Sequence[str]) -> None:
    """Expect log-probs over what was allowed, and that as the support; without replay, marks instead."""
    replays = probe.capabilities.sampling_replay
    if not replays and output.constrained != (True,) * len(output.token_ids):
        cause = "marks are missing: ids would be trained on as if they had been sampled freely"
        raise CheckFailed("ids under a grammar", expected="marked as constrained", got="no mark", cause=cause)
    kept = supported(probe, output) if replays else None
    logits = predictions(probe.subject.reference, prompt, output.token_ids, probe.serving)
    lengths = np.array([len(text) if _WORD.fullmatch(text) else _MOST + 1 for text in texts])
    ends = np.isin(np.arange(len(texts)), sorted(probe.subject.eos_ids))
    written = 0
    for at, (token, got) in enumerate(zip(output.token_ids, output.log_probs, strict=True)):
        allowed = np.where(ends, written >= _LEAST, lengths + written <= _MOST)
        if kept is not None and (kept[at] != allowed).any():
            cause = "supports are those of another position, or of draws before the mask"
            wrong = f"{(kept[at] & ~allowed).sum()} ids too many and {(allowed & ~kept[at]).sum()} too few"
            raise CheckFailed(f"support of id {at}", expected="what the grammar left", got=wrong, cause=cause)
        right = log_softmax(np.where(allowed, logits[at, : len(texts)], -np.inf))[token]
        if not abs(got - right) <= probe.subject.tolerance and probe.capabilities.logprobs:
            cause = "log-probs are taken before the mask"
            raise CheckFailed(f"log-prob of id {at} under a grammar", expected=right, got=got, cause=cause)
        written += int(lengths[token])
