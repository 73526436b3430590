"""How generations end: EOS, stop ids, stop strings, max_tokens."""

from __future__ import annotations

from jax_agent_rl.testing.conformance.check import check
from jax_agent_rl.testing.conformance.probe import DoesNotApply, Probe
from jax_agent_rl.types import StopReason

_LONGEST_ANSWER = 48


async def find_ending(probe: Probe) -> tuple[list[int], tuple[int, ...]]:
    """Find a prompt after which a greedy generation reaches EOS, and its ids up to there.

    Raises:
        DoesNotApply: none of the prompts tried does.
    """
    candidates = [list(prompt) for prompt in probe.subject.ending_prompts]
    candidates += [probe.prompt(5, seed=100 + i) for i in range(64)]
    for begin in range(0, len(candidates), 16):
        some = candidates[begin : begin + 16]
        outputs = await probe.gather(some, max_tokens=_LONGEST_ANSWER)
        for prompt, output in zip(some, outputs, strict=True):
            at = next((i for i, token in enumerate(output.token_ids) if token in probe.subject.eos_ids), 0)
            if at > 1:
                probe.expect_greedy(prompt, output, "greedy ids with ignore_eos", cause="wrong ids, see greedy checks")
                return prompt, output.token_ids[: at + 1]
    raise DoesNotApply(f"no prompt tried leads this model to EOS within {_LONGEST_ANSWER} greedy ids")


@check("eos-kept")
async def eos(probe: Probe) -> None:
    """EOS ends a generation and is its last id, with its log-prob; at max_tokens it still counts as EOS."""
    prompt, whole = await find_ending(probe)
    for limit in (_LONGEST_ANSWER, len(whole)):
        output = await probe.generate(prompt, max_tokens=limit, ignore_eos=False)
        what = f"an answer that ends after {len(whole)} ids, max_tokens={limit}"
        probe.equal(output.token_ids, whole, f"{what}: its ids", cause="EOS is dropped, or does not end the generation")
        probe.equal(
            (output.stop_reason, output.stop_match),
            (StopReason.EOS, None),
            f"{what}: stop_reason, stop_match",
            cause="the reason is derived from the length, or EOS is reported as a stop id",
        )
        if probe.capabilities.logprobs:
            probe.expect_logprobs(
                prompt, output, f"{what}: log-probs", cause="the log-prob of EOS is missing or shifted"
            )


@check("stop-token-ids")
async def stop_ids(probe: Probe) -> None:
    """Extra stop ids end a generation, are kept, and are named in stop_match."""
    prompt = probe.prompt(10, seed=20)
    whole = (await probe.generate(prompt, max_tokens=12)).token_ids
    stop = whole[4]
    output = await probe.generate(prompt, max_tokens=12, stop_token_ids=(stop,))
    probe.equal(
        output.token_ids,
        whole[: whole.index(stop) + 1],
        f"ids up to the first {stop}",
        cause="stop ids are ignored, or the stop id is dropped",
    )
    probe.equal(
        (output.stop_reason, output.stop_match),
        (StopReason.STOP, str(stop)),
        "stop_reason, stop_match",
        cause="a stop id is reported as EOS or without its name",
    )


@check("stop-strings", needs=["stop_strings"])
async def stop_strings(probe: Probe) -> None:
    """Stop strings end a generation at the id that completes them; all ids up to that one are kept."""
    decode = probe.subject.decode_text
    if decode is None:
        raise DoesNotApply("the suite was given no tokenizer to decode with")
    prompt = probe.prompt(10, seed=21)
    whole = (await probe.generate(prompt, max_tokens=24)).token_ids
    texts = [decode(whole[:n]) for n in range(len(whole) + 1)]
    stop = _across_ids(texts)
    cut = next(n for n, text in enumerate(texts) if stop in text)
    output = await probe.generate(prompt, max_tokens=24, stop=("\x00never\x00", stop))
    probe.equal(
        output.token_ids,
        whole[:cut],
        f"ids of {texts[-1]!r} up to {stop!r}",
        cause="ids that make up the stop string are cut off, or it is looked for in single ids only",
    )
    probe.equal(
        (output.stop_reason, output.stop_match),
        (StopReason.STOP, stop),
        "stop_reason, stop_match",
        cause="the string that matched is not reported",
    )


def _across_ids(texts: list[str]) -> str:
    """Find a string that spans the texts of two ids; ``texts`` are those of each prefix."""
    for n in range(3, len(texts) - 1):
        begin = max(0, len(texts[n]) - 1)
        piece = texts[n + 1][begin : len(texts[n]) + 1]
        if len(piece) == 2 and piece.isprintable() and "\ufffd" not in texts[n + 1]:
            return piece
    raise DoesNotApply("the greedy output holds no clean text to stop at")


@check("max-tokens-exact")
async def max_tokens(probe: Probe) -> None:
    """Exactly max_tokens ids, with LENGTH, if nothing else ends the generation."""
    limits = (1, 2, 3, 7, 16, 33)
    prompt = probe.prompt(9, seed=22)
    tasks = [probe.begin(prompt, max_tokens=limit, temperature=1.0) for limit in limits]
    for limit, task in zip(limits, tasks, strict=True):
        output = await task
        probe.equal(
            (len(output.token_ids), output.stop_reason),
            (limit, StopReason.LENGTH),
            f"ids and reason with max_tokens={limit}",
            cause="the first or last id is not counted, or a whole dispatch of several steps is returned",
        )
