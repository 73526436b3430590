"""A single request: its ids and their log-probs."""

from __future__ import annotations

import contextlib

from jax_agent_rl.errors import BackendError, PromptTooLongError
from jax_agent_rl.sampling_params import ID_BOUND
from jax_agent_rl.testing.conformance.check import check
from jax_agent_rl.testing.conformance.probe import Probe
from jax_agent_rl.types import StopReason, digest_ids


@check("greedy-matches-reference")
async def greedy(probe: Probe) -> None:
    """Temperature 0 gives the ids of a full forward pass over the same weights."""
    prompts = [probe.prompt(length, seed=1) for length in (1, 3, 17, 40, 90)]
    outputs = await probe.gather(prompts, max_tokens=16)
    for prompt, output in zip(prompts, outputs, strict=True):
        what = f"greedy continuation of a prompt of {len(prompt)} ids"
        probe.expect_greedy(
            prompt, output, what, cause="wrong weights, positions off by one, or KV of another request is read"
        )
        probe.equal(len(output.token_ids), 16, f"{what}: its length", cause="max_tokens or ignore_eos is not honoured")


@check("greedy-logprobs", needs=["logprobs"])
async def greedy_logprobs(probe: Probe) -> None:
    """Greedy log-probs are those of temperature 1."""
    prompt = probe.prompt(20, seed=2)
    output = await probe.generate(prompt, max_tokens=16)
    probe.expect_logprobs(
        prompt, output, "log-probs at temperature 0", cause="greedy log-probs are reported as 0, or scaled by 1/epsilon"
    )


@check("logprobs-temperature", needs=["logprobs"])
async def temperature(probe: Probe) -> None:
    """Log-probs are those of the distribution after temperature."""
    prompt = probe.prompt(20, seed=3)
    for value in (1.0, 0.6, 1.4) if probe.capabilities.any_sampling else (1.0,):
        output = await probe.generate(prompt, max_tokens=24, temperature=value, seed=11)
        probe.expect_logprobs(
            prompt,
            output,
            f"log-probs at temperature {value:g}",
            temperature=value,
            cause="raw log-probs (before temperature) are reported, or they are shifted by one position",
        )


@check("logprobs-top-p", needs=["logprobs", "any_sampling"])
async def top_p(probe: Probe) -> None:
    """With top-p, ids are in the nucleus and log-probs are normalized over it."""
    prompt = probe.prompt(20, seed=4)
    for mass, heat in ((0.7, 1.0), (0.9, 1.3)):
        output = await probe.generate(prompt, max_tokens=24, temperature=heat, top_p=mass, seed=12)
        probe.expect_logprobs(
            prompt,
            output,
            f"log-probs at top_p={mass:g}, temperature {heat:g}",
            temperature=heat,
            top_p=mass,
            cause="log-probs of the untruncated distribution are reported, or top-p is applied before temperature",
        )


@check("logprobs-top-k", needs=["logprobs", "any_sampling"])
async def top_k(probe: Probe) -> None:
    """With top-k, ids are among the k most likely and log-probs are normalized over them."""
    prompt = probe.prompt(20, seed=5)
    output = await probe.generate(prompt, max_tokens=24, temperature=1.2, top_k=4, seed=13)
    probe.expect_logprobs(
        prompt,
        output,
        "log-probs at top_k=4, temperature 1.2",
        temperature=1.2,
        top_k=4,
        cause="log-probs of the untruncated distribution are reported, or top-k is ignored",
    )


@check("ids-in-ids-out")
async def ids(probe: Probe) -> None:
    """Exactly the given ids are conditioned on; every sampled id has a log-prob and a version."""
    ids_with_eos = [*probe.prompt(6, seed=6), *sorted(probe.subject.eos_ids)[:1], *probe.prompt(5, seed=7)]
    repeated = [ids_with_eos[0]] * 9  # a detour over text would merge or split these
    for prompt in (ids_with_eos, repeated, probe.prompt(33, seed=8)):
        output = await probe.generate(prompt, max_tokens=12, temperature=1.0, seed=5)
        probe.equal(
            output.context_digest,
            digest_ids([*prompt, *output.token_ids]),
            "digest of prompt and output as the engine saw them",
            cause="the prompt went through text, a BOS id was added, or ids were cut or padded",
        )
        vocabulary = probe.subject.vocab_size
        probe.expect(
            all(type(i) is int and 0 <= i < vocabulary for i in output.token_ids),
            "sampled ids",
            expected=f"Python ints in [0, {vocabulary})",
            got=output.token_ids,
            cause="padding ids or array scalars leak into the output",
        )
        probe.equal(
            set(output.policy_versions),
            {probe.backend.policy_version},
            "versions of the ids",
            cause="versions are not those of the weights served",
        )


@check("bad-ids-refused")
async def bad_ids(probe: Probe) -> None:
    """Ids outside the vocabulary raise a BackendError for this request alone."""
    for bad in (probe.subject.vocab_size, -1):
        await probe.raises(
            BackendError,
            probe.generate([5, bad]),
            f"a prompt with id {bad}",
            cause="ids are not checked before they index the embedding: an engine reads garbage or dies of it",
        )
    prompt = probe.prompt(5, seed=9)
    probe.expect_greedy(
        prompt, await probe.generate(prompt), "a request after a refused one", cause="the refused one broke the engine"
    )


@check("extremes-harm-nobody")
async def extremes(probe: Probe) -> None:
    """Extreme values in a request are served or raise its own BackendError; other requests are unaffected."""
    count, prompt = probe.room - 24, probe.prompt(8, seed=13)
    beside = (await probe.started(prompt, max_tokens=count)).task
    cause = "values are not checked before they reach the engine's arrays: one request ends those of everybody"
    for extreme in ({"top_k": ID_BOUND - 1, "temperature": 1.0}, {"stop_token_ids": (ID_BOUND - 1,)}):
        with contextlib.suppress(BackendError):
            await probe.within(60, probe.begin(prompt, **extreme), f"an answer to a request of {extreme}", cause=cause)
    probe.equal(len((await beside).token_ids), count, "ids of a request that ran beside them", cause=cause)
    probe.expect_greedy(prompt, await probe.generate(prompt), "a request after them", cause=cause)


@check("prompt-too-long")
async def too_long(probe: Probe) -> None:
    """Too long a prompt raises PromptTooLongError with its length and the limit."""
    limit = probe.capabilities.max_model_len
    for length in (limit, limit + 7):
        error = await probe.raises(
            PromptTooLongError,
            probe.generate(probe.prompt(length, seed=10)),
            f"a prompt of {length} ids with max_model_len={limit}",
            cause="the prompt is truncated silently, or the engine's own error is not translated",
        )
        probe.expect(
            str(length) in str(error) and str(limit) in str(error),
            "the message of PromptTooLongError",
            expected=f"text with {length} and {limit}",
            got=str(error),
            cause="a message without numbers cannot be acted on",
        )


@check("context-limit")
async def context_limit(probe: Probe) -> None:
    """When the context is full, a generation ends with LENGTH."""
    limit = probe.capabilities.max_model_len
    output = await probe.generate(probe.prompt(limit - 3, seed=11), max_tokens=50)
    probe.equal(
        (len(output.token_ids), output.stop_reason),
        (3, StopReason.LENGTH),
        f"ids after a prompt of max_model_len - 3 = {limit - 3}",
        cause="the last position is left unused, or the prompt was cut to make room",
    )


@check("streaming-chunks", needs=["streaming"])
async def streaming(probe: Probe) -> None:
    """Chunks add up to the final output and arrive before the end."""
    prompt = probe.prompt(12, seed=12)
    async with probe.streaming(probe.request(prompt, max_tokens=60, temperature=1.0, seed=3)) as stream:
        chunks = [chunk async for chunk in stream]
    final = chunks[-1].final
    probe.expect(
        final is not None and all(chunk.final is None for chunk in chunks[:-1]),
        "where `final` is",
        expected="on the last chunk only",
        got=[chunk.final is not None for chunk in chunks],
        cause="the stream goes on after the end, or ends without a result",
    )
    assert final is not None
    for name in ("token_ids", "log_probs", "policy_versions"):
        joined = sum((getattr(chunk, name) for chunk in chunks), ())
        probe.equal(
            joined, getattr(final, name), f"{name} of all chunks", cause="a chunk is lost, repeated or reordered"
        )
    probe.expect(
        len(chunks) > 1, "chunks of 60 ids", expected="more than one", got=len(chunks), cause="the output is buffered"
    )
