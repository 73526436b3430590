"""A real engine, tokenizer and chat template, all tiny: a random model whose every reply is read as
the test wants.

The tokenizer is a byte-level BPE with merges, so that text which a random model sampled is
tokenized differently when it is tokenized again: an agent loop that re-tokenizes cannot pass.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from jax_agent_rl.agents import AgentContext
from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.chat.formats import Reply, ToolCall
from jax_agent_rl.config import AgentConfig
from jax_agent_rl.jetstream.backend import JetStreamBackend
from jax_agent_rl.jetstream.engine import EngineShapes
from jax_agent_rl.models.config import Params
from jax_agent_rl.models.decoder import Decoder
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.protocol import GenerateRequest
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.tools import ToolRegistry
from jax_agent_rl.types import Support, TokenOutput, Trajectory
from jax_agent_rl.types.supports import decode_supports
from tests.fakes import GrowingFake
from tests.tiny import TINY, tiny_params

LONGEST = 512
TEMPLATE = (
    "{% if tools %}<|start|>tools{% for t in tools %}{{ t.function.name }} {% endfor %}<|end|>"
    "{% endif %}{% for m in messages %}<|start|>{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }}{{ c.function.arguments | tojson }}]"
    "{% endfor %}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant:{% endif %}"
)
CORPUS = [
    "what is one plus two",
    "the answer is three",
    "user assistant tool system question",
    "add numbers here",
]
CONFIG = replace(TINY, vocab_size=400)


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG.vocab_size,
        special_tokens=["<|pad|>", "<|start|>", "<|end|>"],  # id 2 is the tiny model's EOS
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    model.train_from_iterator(CORPUS * 3, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token="<|end|>", chat_template=TEMPLATE
    )


class TinyCodec(ChatCodec):
    """Reads a reply as a call of ``add`` unless its first id can be divided by three: a random
    model calls tools.
    """

    def __init__(self) -> None:
        super().__init__(tokenizer())

    def parse_reply(
        self,
        sampled_ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        context_ids: Sequence[int] | None = None,
    ) -> Reply:
        text = self.decode(sampled_ids).strip()
        calls = (
            (ToolCall(name="add", arguments={"a": 1, "b": len(sampled_ids)}),)
            if sampled_ids[0] % 3
            else ()
        )
        return Reply(content=text, tool_calls=calls)

    def growing_reply(self, context_ids: Sequence[int]) -> GrowingFake:
        return GrowingFake(self, context_ids)


class Watched(JetStreamBackend):
    """Keeps what was asked of the engine and what it answered."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[tuple[GenerateRequest, TokenOutput]] = []

    async def stream(self, request):
        async for chunk in super().stream(request):
            if chunk.final is not None:
                self.seen.append((request, chunk.final))
            yield chunk


@functools.cache
def params() -> Params:
    return tiny_params(5, CONFIG)


@contextlib.asynccontextmanager
async def tiny_context(
    *, tools=(), codec: ChatCodec | None = None, longest: int = LONGEST, **limits
) -> AsyncIterator[AgentContext]:
    """What agent loops are given, over a started JAX engine.

    ``context.client.pool.servers[0].backend`` is watched.
    """
    codec = codec or TinyCodec()
    shapes = EngineShapes(
        max_model_len=longest,
        max_concurrent_decodes=4,
        kv_cache_tokens=8 * longest,
        decode_steps=4,
        prefill_buckets=(32, 128),
    )
    decode = functools.partial(codec.decode, skip_special_tokens=False)
    grammars = codec.grammar_compiler(eos_ids=CONFIG.eos_token_ids, vocab_size=CONFIG.vocab_size)
    backend = Watched(CONFIG, params(), shapes, seed=3, decode_text=decode, grammars=grammars)
    await backend.start()
    try:
        yield AgentContext(
            client=LLMServerClient([AsyncServer(backend)], decode_text=decode),
            codec=codec,
            tools=ToolRegistry(tools),
            limits=AgentConfig(
                **{"max_prompt_length": longest // 2, "max_response_length": longest // 2, **limits}
            ),
            max_model_len=longest,
        )
    finally:
        await backend.close()


@jax.jit
def _padded_logits(params: Params, ids: jax.Array) -> jax.Array:
    model = Decoder.from_params(CONFIG, params)
    return model.logits(model(ids[None])[0])[0]


def reference_logprobs(ids: Sequence[int], supports: Sequence[Support | None] = ()) -> np.ndarray:
    """Log-prob of every id but the first, by one full pass: no cache, no turns; float64 [T - 1].

    The last ids were drawn from ``supports``, those before them from the whole vocabulary.
    """
    padded = np.zeros(
        LONGEST << ((len(ids) - 1) // LONGEST).bit_length(), np.int32
    )  # few shapes to compile for
    padded[: len(ids)] = ids
    scores = np.asarray(_padded_logits(params(), padded))[: len(ids) - 1].astype(np.float64)
    if supports:
        masks = decode_supports(supports, CONFIG.vocab_size).view(np.uint8)
        bits = np.unpackbits(masks, axis=1, bitorder="little")[:, : CONFIG.vocab_size]
        support = bits.astype(bool)
        scores[-len(supports) :][~support] = -np.inf
    normalized = scores - np.log(
        np.exp(scores - scores.max(-1, keepdims=True)).sum(-1, keepdims=True)
    )
    normalized -= scores.max(-1, keepdims=True)
    return normalized[np.arange(len(ids) - 1), list(ids)[1:]]


def assert_sampled_once(
    trajectory: Trajectory, calls: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> None:
    """Everything trained on was sampled in exactly the context it stands in, and only once.

    Args:
        calls: what an engine was asked and what it answered, in ids.
    """
    answers: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for prompt_ids, token_ids in calls:
        answers.setdefault(tuple(prompt_ids), []).append(tuple(token_ids))
    for sequence in trajectory.sequences:
        context = sequence.prompt_ids
        for turn in sequence.turns:
            answers[context].remove(
                turn.output.token_ids
            )  # raises unless sampled there; removed: trained on once
            context += turn.output.token_ids + turn.appended_ids
        assert context == sequence.prompt_ids + sequence.response_ids


def assert_exact(trajectory: Trajectory, backend: Watched) -> None:
    """Everything trained on was sampled by the engine in exactly the context it stands in, and only
    once, with the log-probs of a full pass.
    """
    calls = [(request.prompt_ids, output.token_ids) for request, output in backend.seen]
    assert_sampled_once(trajectory, calls)
    for sequence in trajectory.sequences:
        context = sequence.prompt_ids + sequence.response_ids
        expected = reference_logprobs(context, sequence.supports)[len(sequence.prompt_ids) - 1 :]
        mask = np.asarray(sequence.response_mask, bool)
        free = np.asarray(sequence.loss_mask, bool)
        np.testing.assert_allclose(
            np.asarray(sequence.rollout_logprobs)[free], expected[free], atol=2e-4
        )
        assert not np.asarray(sequence.rollout_logprobs)[~mask].any()
