"""Grammars in the JAX engine, on a random model: the output follows them, and everything else stays
as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import replace

import numpy as np
import pytest

from jax_agent_rl.chat.grammar import GrammarCompiler
from jax_agent_rl.errors import BackendError
from jax_agent_rl.jetstream.backend import JetStreamBackend
from jax_agent_rl.jetstream.engine import EngineShapes
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.protocol import GenerateRequest
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.types import PauseMode, SamplingParams, StopReason, digest_ids
from jax_agent_rl.types.supports import decode_supports
from tests.messages import raises
from tests.tiny import full_logits, tiny_params
from tests.tiny_chat import CONFIG, tokenizer

SHAPES = EngineShapes(
    max_model_len=64,
    max_concurrent_decodes=4,
    kv_cache_tokens=384,
    decode_steps=4,
    prefill_buckets=(4, 16),
)
PARAMS = tiny_params(config=CONFIG)
EOS = 2
FLAGS = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "size": {"enum": ["small", "large"]}},
    "required": ["ok", "size"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
JSON = f"start: %json {json.dumps(FLAGS)}"
LETTERS = r"start: /[a-z]{3,9}/"


def to_text(ids) -> str:
    return tokenizer().decode(list(ids))


@contextlib.asynccontextmanager
async def running(**options):
    grammars = GrammarCompiler(
        tokenizer(), eos_ids=CONFIG.eos_token_ids, vocab_size=CONFIG.vocab_size
    )
    settings = {"grammars": grammars, "decode_text": to_text} | options
    backend = JetStreamBackend(CONFIG, PARAMS, SHAPES, version=1, seed=3, **settings)
    await backend.start()
    try:
        yield backend
    finally:
        await backend.close()


def request(name: str, prompt=(5, 6, 7), *, max_tokens=40, **sampling) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt_ids=tuple(prompt),
        sampling=SamplingParams(
            max_tokens=max_tokens, **{"temperature": 1.0, "seed": 1} | sampling
        ),
    )


async def test_every_output_is_one_of_its_grammar_and_ends_there():
    async with running() as backend:
        assert backend.capabilities.grammars
        outputs = await asyncio.gather(
            *(backend.generate(request(f"j{seed}", grammar=JSON, seed=seed)) for seed in range(4)),
            *(
                backend.generate(request(f"l{seed}", grammar=LETTERS, seed=seed))
                for seed in range(4)
            ),
        )
    for output in outputs[:4]:
        value = json.loads(to_text(output.token_ids[:-1]))
        assert value.keys() == {"ok", "size"}
        assert value["ok"] in (True, False)
        assert value["size"] in ("small", "large")
    for output in outputs[4:]:
        assert to_text(output.token_ids[:-1]).isalpha()
        assert 3 <= len(to_text(output.token_ids[:-1])) <= 9
    for output in outputs:
        assert (output.token_ids[-1], output.stop_reason) == (EOS, StopReason.EOS)
        assert output.context_digest == digest_ids([5, 6, 7, *output.token_ids])
    assert len({output.token_ids for output in outputs}) > 4  # it is sampled, not chosen


async def test_a_limit_cuts_a_constrained_output_as_any_other():
    async with running() as backend:
        output = await backend.generate(request("r", grammar=JSON, max_tokens=3))
    assert len(output.token_ids) == 3
    assert output.stop_reason is StopReason.LENGTH
    assert to_text(output.token_ids).startswith("{")


async def test_ids_have_logprobs_and_supports_of_what_the_grammar_left():
    """Golden: full passes without a cache, normalized in float64 over the ids that spell what each
    grammar allows.
    """
    texts = [tokenizer().decode([i]) for i in range(CONFIG.vocab_size)]
    letters = [
        i for i, text in enumerate(texts) if text.isascii() and text.isalpha() and text.islower()
    ]
    async with running() as backend:
        restricted, nearly_free = await asyncio.gather(
            backend.generate(request("a", grammar="start: /[a-z]*/")),
            backend.generate(
                request("b", grammar="start: (/[^q]/ | <[0-1]> | <[3-399]>)*", max_tokens=12)
            ),
        )
    assert restricted.constrained == nearly_free.constrained == ()
    assert restricted.loss_mask == (1,) * len(restricted.token_ids)
    assert kept_ids(restricted)[0] == {*letters, EOS}
    assert kept_ids(nearly_free)[0] == set(range(400))
    np.testing.assert_allclose(
        restricted.log_probs, expected_logprobs(restricted.token_ids, [*letters, EOS]), atol=5e-5
    )
    np.testing.assert_allclose(
        nearly_free.log_probs, expected_logprobs(nearly_free.token_ids, range(400)), atol=5e-5
    )


def kept_ids(output) -> list[set[int]]:
    masks = decode_supports(output.supports, CONFIG.vocab_size)
    return [
        set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())
        for mask in masks
    ]


def expected_logprobs(sampled, support) -> np.ndarray:
    logits = full_logits(PARAMS, [5, 6, 7, *sampled], CONFIG)[2:-1].astype(np.float64)
    log_total = np.log(np.exp(logits[:, list(support)]).sum(axis=-1))
    return logits[np.arange(len(sampled)), list(sampled)] - log_total


async def test_requests_beside_a_constrained_one_sample_what_they_sample_alone():
    prompts = [tuple(np.random.default_rng(i).integers(3, 400, 9)) for i in range(3)]
    plain = [request(f"p{i}", prompt, max_tokens=12, seed=i) for i, prompt in enumerate(prompts)]
    async with running() as backend:
        alone = await asyncio.gather(*map(backend.generate, plain))
        again = [
            replace(plain_request, request_id=f"{plain_request.request_id}-again")
            for plain_request in plain
        ]
        constrained, *concurrent = await asyncio.gather(
            backend.generate(request("j", grammar=JSON)), *map(backend.generate, again)
        )
        repeated = await backend.generate(request("k", grammar=JSON))
    assert [output.token_ids for output in concurrent] == [output.token_ids for output in alone]
    assert not any(output.supports for output in concurrent)
    for concurrent_output, alone_output in zip(concurrent, alone, strict=True):
        np.testing.assert_allclose(concurrent_output.log_probs, alone_output.log_probs, atol=1e-5)
    assert repeated.token_ids == constrained.token_ids  # the same seed


async def test_a_grammar_compiles_its_program_once_and_counts_as_no_recompilation():
    lines: list[str] = []
    async with running(compile_ahead=True, print_line=lines.append) as backend:
        ahead = len(backend.core.scheduler.engine.program_table)
        await backend.generate(request("a"))
        assert len(backend.core.scheduler.engine.program_table) == ahead
        await backend.generate(request("b", grammar=JSON, max_tokens=3))
        once = len(backend.core.scheduler.engine.program_table)
        await backend.generate(request("c", grammar=LETTERS, max_tokens=3))
        assert len(backend.core.scheduler.engine.program_table) == once > ahead
        assert (await backend.metrics()).recompilations == 0


async def test_an_interrupted_output_continues_in_its_grammar_where_it_was():
    async with running() as backend:
        uninterrupted = await backend.generate(request("whole", grammar=JSON))
        client = LLMServerClient([AsyncServer(backend)])
        seen: list[int] = []
        task = asyncio.create_task(
            client.generate(
                "cut",
                prompt_ids=(5, 6, 7),
                sampling_params=request("cut", grammar=JSON).sampling,
                on_ids=seen.extend,
            )
        )
        while len(seen) < 4:
            await asyncio.sleep(0)
        await backend.pause(PauseMode.ABORT)
        await backend.resume()
        output = await task
    assert (output.token_ids, output.supports) == (uninterrupted.token_ids, uninterrupted.supports)


@pytest.mark.parametrize(
    ("grammar", "named"),
    [
        ('start: %json {"type": "objekt"}', {"value": "objekt"}),
        ("no grammar", {"value": "Expected token"}),
        (
            'start: %json {"type": "array", "maxItems": 10000000}',
            {"key": "maxItems", "value": 10000000},
        ),
    ],
)
async def test_a_wrong_grammar_fails_its_own_request_with_the_reason(grammar, named):
    async with running() as backend:
        with raises(BackendError, **named):
            await backend.generate(request("r", grammar=grammar))
        assert (await backend.generate(request("r", max_tokens=3))).token_ids


async def test_an_engine_without_a_compiler_refuses_grammars():
    async with running(grammars=None) as backend:
        assert not backend.capabilities.grammars
        with raises(BackendError, value="grammar", fix="cannot follow"):
            await backend.generate(request("r", grammar=JSON))


async def test_a_grammar_that_cannot_be_followed_any_further_fails_its_request_alone(monkeypatch):
    def lose_the_way(
        self, ids
    ):  # as a grammar does that becomes too complex for the library's limits
        self._matcher.consume_tokens([1] if ids else [])

    async with running() as backend:
        monkeypatch.setattr("jax_agent_rl.chat.grammar.GrammarState.consume", lose_the_way)
        unconstrained = asyncio.create_task(backend.generate(request("beside", max_tokens=20)))
        with raises(BackendError, value="its grammar failed"):
            await backend.generate(request("r", grammar=LETTERS))
        assert len((await unconstrained).token_ids) <= 20


@pytest.mark.parametrize("words", [3, 30])
def test_a_mask_has_the_length_of_the_models_vocabulary(words):
    state = GrammarCompiler(tokenizer(), eos_ids=[EOS]).start('start: "" | "x"')
    bits = np.full(words, 7, np.uint32)
    state.fill_allowed(bits)
    allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()
    assert allowed == [i for i in (EOS, tokenizer().convert_tokens_to_ids("x")) if i < 32 * words]
