"""LoRA adapters that requests select by name."""

from __future__ import annotations

import asyncio

from jax_agent_rl.testing.conformance.backend_under_test import ADAPTED, ADAPTER
from jax_agent_rl.testing.conformance.check import check
from jax_agent_rl.testing.conformance.probe import DoesNotApply, Probe


@check("adapters", needs=["lora"])
async def adapters(probe: Probe) -> None:
    """Only requests that name an adapter sample from the model with it merged in."""
    prompt, cause = _prompt(probe, seed=60), "the adapter is not applied, or scaled or laid out wrongly"
    plain, adapted = await asyncio.gather(*(probe.begin(prompt, lora=name) for name in (None, ADAPTER)))
    probe.expect_logprobs(prompt, adapted, "log-probs with an adapter", cause=cause, weights=ADAPTED)
    cause = "an adapter leaks into requests that run beside it"
    probe.expect_logprobs(prompt, plain, "log-probs of the plain model", cause=cause)
    unknown = probe.generate(prompt, lora="nobody's")
    await probe.raises(Exception, unknown, "a request with an unknown adapter", cause="it is served without one")


@check("adapters-and-prefixes", needs=["lora", "prefix_reuse"])
async def adapters_and_prefixes(probe: Probe) -> None:
    """KV is reused under the adapter that computed it, and under no other."""
    prompt = _prompt(probe, seed=61)
    first = await probe.generate(prompt)
    adapted, again = await probe.generate(prompt, lora=ADAPTER), await probe.generate(prompt, lora=ADAPTER)
    cause = "prefixes are compared by ids alone"
    probe.equal((first.cached_tokens, adapted.cached_tokens), (0, 0), "cached_tokens of first requests", cause=cause)
    cause = "requests with adapters never find what was cached"
    probe.expect(again.cached_tokens > 0, "cached_tokens of a repetition", expected="> 0", got=0, cause=cause)
    cause = "the KV reused is of another adapter"
    probe.expect_logprobs(prompt, again, "log-probs on a reused prefix", cause=cause, weights=ADAPTED)


def _prompt(probe: Probe, *, seed: int) -> list[int]:
    if not probe.subject.adapter:
        raise DoesNotApply("the subject serves no adapter of the suite; built-in backends do with --adapters")
    return probe.prompt(64, seed=seed)
