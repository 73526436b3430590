"""Images in requests of the real clients: trained on as the engine saw them, and refused where it
cannot.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import io
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

from jax_agent_rl.agents import AgentContext  # noqa: E402
from jax_agent_rl.agents.frameworks import OpenAIAgentLoop  # noqa: E402
from jax_agent_rl.chat.codec import ChatCodec  # noqa: E402
from jax_agent_rl.chat.special_tokens import MediaTokens  # noqa: E402
from jax_agent_rl.config import AgentConfig, AlgorithmConfig, LearnerConfig  # noqa: E402
from jax_agent_rl.jetstream.engine import EngineShapes  # noqa: E402
from jax_agent_rl.learner.learner import Learner  # noqa: E402
from jax_agent_rl.models.vision_context import VisionProcessor  # noqa: E402
from jax_agent_rl.rollout.client import LLMServerClient  # noqa: E402
from jax_agent_rl.rollout.server import AsyncServer  # noqa: E402
from jax_agent_rl.types import Group, SamplingParams  # noqa: E402
from tests.agent_testbed import episode_request  # noqa: E402
from tests.endpoint_testbed import serving  # noqa: E402
from tests.fakes import FakeCodec  # noqa: E402
from tests.messages import raises  # noqa: E402
from tests.tiny import tiny_params  # noqa: E402
from tests.tiny_chat import Watched  # noqa: E402
from tests.tiny_vision import (  # noqa: E402
    TINY_VISION,
    TINY_VL,
    picture,
    seen_logprobs,
    vision_processor,
)

SPECIAL = [
    "<|pad|>",
    "<|start|>",
    "<|end|>",
    "<|image|>",
    "<|video|>",
    "<|vision|>",
    "<|seen|>",
]  # 2 is the model's EOS
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role[0] }}{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% else %}"
    "{{ '<|vision|><|' + p.type + '|><|seen|>' }}{% endif %}{% endfor %}{% endif %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>a{% endif %}{# 'tool' #}"
)
VISION = replace(
    TINY_VISION, image_token_id=3, video_token_id=4, vision_start_token_id=5, vision_end_token_id=6
)
CONFIG = replace(TINY_VL, vocab_size=300, vision=VISION)
LONGEST = 96
FIRST = picture(1)
SECOND = picture(2, 12, 8)


def processor() -> VisionProcessor:
    return VisionProcessor(vision=VISION, patcher=vision_processor().patcher)


def data_url(image: Image.Image, form: str = "PNG") -> str:
    stream = io.BytesIO()
    image.save(stream, format=form)
    return f"data:image/{form.lower()};base64,{base64.b64encode(stream.getvalue()).decode()}"


@functools.cache
def backend_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *alphabet])}
    model = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens(SPECIAL)
    return model


@functools.cache
def codec() -> ChatCodec:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend_tokenizer(), eos_token="<|end|>", chat_template=TEMPLATE
    )
    return ChatCodec(fast, media=MediaTokens({"image": 3, "video": 4}, processor().patcher))


@contextlib.asynccontextmanager
async def seeing_context():
    """A real engine of a random vision model."""
    shapes = EngineShapes(
        max_model_len=LONGEST,
        max_concurrent_decodes=2,
        kv_cache_tokens=480,
        decode_steps=4,
        prefill_buckets=(64,),
        patch_buckets=(64,),
    )
    decode = functools.partial(codec().decode, skip_special_tokens=False)
    params = tiny_params(config=CONFIG)
    backend = Watched(
        CONFIG, params, shapes, version=0, vision_processor=processor(), decode_text=decode
    )
    await backend.start()
    try:
        yield AgentContext(
            client=LLMServerClient([AsyncServer(backend)], decode_text=decode),
            codec=codec(),
            limits=AgentConfig(max_prompt_length=48, max_response_length=48),
            max_model_len=LONGEST,
        )
    finally:
        await backend.close()


async def chat_completions(base_url, api_key):
    def part(image):
        return {"type": "image_url", "image_url": {"url": data_url(image), "detail": "auto"}}

    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages = [{"role": "user", "content": [{"type": "text", "text": "what"}, part(FIRST)]}]
        answer = await client.chat.completions.create(model="m", messages=messages)
        messages.append(answer.choices[0].message.model_dump(exclude_none=True))
        messages.append(
            {"role": "user", "content": [part(SECOND), {"type": "text", "text": "and"}]}
        )
        await client.chat.completions.create(model="m", messages=messages)


async def responses(base_url, api_key):
    def item(image):
        part = {"type": "input_image", "image_url": data_url(image), "detail": "auto"}
        return {"role": "user", "content": [{"type": "input_text", "text": "what"}, part]}

    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        answer = await client.responses.create(model="m", input=[item(FIRST)])
        await client.responses.create(
            model="m", input=[item(SECOND)], previous_response_id=answer.id
        )


async def anthropic_messages(base_url, api_key):
    def block(image):
        data = data_url(image).partition(",")[2]
        return {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": data},
        }

    async with anthropic.AsyncAnthropic(
        base_url=base_url.removesuffix("/v1"), api_key=api_key
    ) as client:
        messages = [{"role": "user", "content": [block(FIRST), {"type": "text", "text": "what"}]}]
        answer = await client.messages.create(model="m", max_tokens=5, messages=messages)
        messages.append(
            {"role": "assistant", "content": [part.to_dict() for part in answer.content] or "?"}
        )
        result = {"type": "tool_result", "tool_use_id": "t", "content": [block(SECOND)]}
        messages.append({"role": "user", "content": [result]})
        await client.messages.create(model="m", max_tokens=5, messages=messages)


async def gemini(base_url, api_key):
    genai = pytest.importorskip("google.genai")
    from google.genai import types

    def part(image):
        data = base64.b64decode(data_url(image).partition(",")[2])
        return types.Part.from_bytes(data=data, mime_type="image/png")

    options = {"base_url": base_url.removesuffix("/v1")}
    async with genai.Client(api_key=api_key, http_options=options).aio as client:
        chat = client.chats.create(model="m")
        await chat.send_message([part(FIRST), types.Part(text="what")])
        await chat.send_message([part(SECOND), types.Part(text="and")])


@pytest.mark.parametrize(
    "client", [chat_completions, responses, anthropic_messages, gemini], ids=lambda c: c.__name__
)
async def test_images_of_two_turns_are_in_one_exact_trajectory_that_is_trained_on(client):
    async def agent(base_url, api_key, row):
        await client(base_url, api_key)

    loop_class = type(
        "Loop", (OpenAIAgentLoop,), {"function": staticmethod(agent), "name": "test_agent"}
    )
    trajectories = []
    async with seeing_context() as context:
        loop = loop_class(context)
        for seed in range(2):
            sampling = SamplingParams(max_tokens=5, seed=seed)
            trajectories.append(
                await loop.play(
                    episode_request(
                        {"prompt": [{"role": "user", "content": "look"}]},
                        sampling,
                        trajectory_id=f"t-{seed}",
                    )
                )
            )
        await loop.close()
        requests = [request for request, _ in context.client.pool.servers[0].backend.seen]
    for t, (first, second) in zip(trajectories, (requests[:2], requests[2:]), strict=True):
        assert t.segments == ()
        assert t.num_turns == 2
        assert (
            [image.size for image in t.prompt_media["image"]]
            == [FIRST.size]
            == [first.multi_modal["image"][0].size]
        )
        assert [image.size for image in t.multi_modal["image"]] == [FIRST.size, SECOND.size]
        assert (
            second.prompt_ids
            == t.prompt_ids + t.turns[0].output.token_ids + t.turns[0].appended_ids
        )
        media_context = processor().make_context(
            t.prompt_ids + t.response_ids, processor().read({"image": [FIRST, SECOND]})
        )
        expected = seen_logprobs(tiny_params(config=CONFIG), media_context, CONFIG)[:-1]
        expected = expected[np.arange(len(expected)), media_context.ids[1:]][
            len(t.prompt_ids) - 1 :
        ]
        mask = np.asarray(t.response_mask, bool)
        np.testing.assert_allclose(np.asarray(t.rollout_logprobs)[mask], expected[mask], atol=2e-4)
    learner = Learner(
        CONFIG,
        tiny_params(config=CONFIG),
        algorithm=AlgorithmConfig(),
        config=LearnerConfig(pack_length=2 * LONGEST, row_patches=128, remat="none"),
        temperature=1.0,
        vision_processor=processor(),
    )
    group = Group(
        group_id="g",
        trajectories=tuple(replace(t, reward=float(i)) for i, t in enumerate(trajectories)),
    )
    metrics = learner.update([group]).metrics
    assert metrics["logprob_gap_max"] < 1e-3
    assert metrics["grad_norm"] > 0
    assert metrics["trained_tokens"] == sum(t.num_sampled for t in trajectories)


# --- over a scripted engine -----------------------------------------------------------------------


def asking(*parts):
    return [
        {
            "role": "user",
            "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts],
        }
    ]


def image_part(url: str, **fields):
    return {"type": "image_url", "image_url": {"url": url, **fields}}


@contextlib.asynccontextmanager
async def seeing_stage(script, **limits):
    sees = FakeCodec(modalities=frozenset({"image"}))
    async with serving(script, codec=sees, limits=limits) as stage:
        stage.backend.capabilities = replace(
            stage.backend.capabilities, multi_modal=frozenset({"image"})
        )
        yield stage


async def test_text_and_images_keep_their_order():
    async with seeing_stage(["hello"]) as stage, stage.client("/sessions/s/v1") as client:
        messages = asking(
            "a", image_part(data_url(FIRST)), "b", image_part(data_url(SECOND, "JPEG"))
        )
        await client.chat.completions.create(model="x", messages=messages)
        (parts,) = (message["content"] for message in asking("c", image_part(data_url(FIRST))))
        messages.append({"role": "tool", "tool_call_id": "t", "content": parts})
        await client.chat.completions.create(model="x", messages=messages)
    first, second = stage.backend.requests
    assert stage.codec.decode(first.prompt_ids) == "user: a <image> b <image>assistant:"
    assert (
        stage.codec.decode(second.prompt_ids)
        == "user: a <image> b <image>tool: <image> cassistant:"
    )
    assert [image.size for image in second.multi_modal["image"]] == [
        FIRST.size,
        SECOND.size,
        FIRST.size,
    ]


def test_tools_of_a_template_without_a_place_for_them_stand_before_an_image():
    no_system = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        + TEMPLATE
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend_tokenizer(), chat_template=no_system
    )
    asked = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what"}]}
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    text = codec().decode(
        ChatCodec(tokenizer, eos_token_ids=[2]).encode_prompt([asked], [tool]),
        skip_special_tokens=False,
    )
    assert text.index('"add"') < text.index("<|image|>") < text.index("what")


async def test_another_image_under_the_same_text_is_another_conversation():
    async with (
        seeing_stage(["one", "two", "three"]) as stage,
        stage.client("/sessions/s/v1") as client,
    ):
        said = {"role": "assistant", "content": "one"}
        for image in (FIRST, SECOND, FIRST):
            history = asking("what", image_part(data_url(image)))
            new_messages = (
                [] if not stage.backend.requests else [said, {"role": "user", "content": "and"}]
            )
            await client.chat.completions.create(model="x", messages=[*history, *new_messages])
        first, with_other_image, third = stage.store.known("s", "any").recorder.turns
    assert with_other_image.parent is None
    assert third.parent is first
    assert [image.size for image in stage.backend.requests[2].multi_modal["image"]] == [FIRST.size]


async def test_tokens_are_counted_with_their_images():
    data = data_url(FIRST).partition(",")[2]
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    asked = [{"role": "user", "content": [image, {"type": "text", "text": "what"}]}]
    async with seeing_stage(["hello"]) as stage:
        async with anthropic.AsyncAnthropic(
            base_url=stage.server.url, api_key="any", max_retries=0
        ) as client:
            count = await client.messages.count_tokens(model="policy", messages=asked)
            answer = await client.messages.create(model="policy", max_tokens=9, messages=asked)
    assert (
        count.input_tokens == answer.usage.input_tokens == len(stage.backend.requests[0].prompt_ids)
    )


WRONG = {
    "an address": (
        asking(image_part("https://example.org/a.png")),
        {"value": "other addresses"},
    ),
    "a file": (asking(image_part("file:///etc/passwd")), {"value": "other addresses"}),
    "no image": (asking(image_part("data:image/png;base64,AAAA")), {"value": "cannot be read"}),
    "not base64": (asking(image_part("data:image/png;base64,%%")), {"value": "cannot be read"}),
    "less detail": (
        asking(image_part(data_url(FIRST), detail="low")),
        {"key": "detail", "value": "'low'"},
    ),
    "too large": (asking(image_part(data_url(Image.new("1", (5000, 4000))))), {"value": 16000000}),
    "too many": (
        asking(*(image_part(data_url(picture(seed))) for seed in range(65))),
        {"value": ("65 images", 64)},
    ),
    "another role": (
        [{**asking(image_part(data_url(FIRST)))[0], "role": "system"}],
        {"fix": "role user or tool"},
    ),
    "a sound": (
        asking({"type": "input_audio", "input_audio": {}}),
        {"value": "text and images"},
    ),
}


@pytest.mark.parametrize("name", WRONG)
async def test_what_cannot_be_shown_is_refused_and_says_why(name: str):
    messages, named = WRONG[name]
    async with seeing_stage(["hello"]) as stage, stage.client() as client:
        with raises(openai.BadRequestError, **named):
            await client.chat.completions.create(model="policy", messages=messages)
        assert stage.backend.requests == []


async def test_the_images_of_a_session_have_a_limit_and_those_it_knows_cost_nothing():
    async with (
        seeing_stage(["hello"], max_session_pixels=100) as stage,
        stage.client("/sessions/s/v1") as client,
    ):
        known = asking("what", image_part(data_url(FIRST)))  # 64 pixels
        for _ in range(3):
            await client.chat.completions.create(model="x", messages=known)
        with raises(openai.BadRequestError, key="max_session_pixels", value=(100, "36 are left")):
            await client.chat.completions.create(
                model="x", messages=asking(image_part(data_url(SECOND)))
            )
        await client.chat.completions.create(model="x", messages=known)
        assert len(stage.store.known("s", "any").recorder.turns) == 4


async def test_more_images_than_ids_fit_are_refused_before_they_are_decoded(monkeypatch):
    monkeypatch.setattr("jax_agent_rl.agents.prompt.read_images", None)
    async with seeing_stage(["hello"]) as stage, stage.client() as client:
        messages = asking(*[image_part("data:image/png;base64,AA")] * 1000)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="policy", messages=messages)
    assert caught.value.code == "context_length_exceeded"


async def test_a_model_of_text_refuses_images_with_the_apis_own_error():
    url = data_url(FIRST)
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    async with serving(["hello"]) as stage, stage.client() as client:
        with raises(openai.BadRequestError, value="text only") as caught:
            await client.chat.completions.create(model="policy", messages=asking(image_part(url)))
        assert caught.value.param == "messages"
        with raises(openai.BadRequestError, value="text only"):
            item = {
                "role": "user",
                "content": [{"type": "input_image", "image_url": url, "detail": "auto"}],
            }
            await client.responses.create(model="policy", input=[item])
        async with anthropic.AsyncAnthropic(
            base_url=stage.server.url, api_key="any", max_retries=0
        ) as claude:
            with raises(anthropic.BadRequestError, value="text only") as caught:
                block = {"type": "image", "source": source}
                await claude.messages.create(
                    model="policy", max_tokens=9, messages=[{"role": "user", "content": [block]}]
                )
        assert caught.value.body["error"]["type"] == "invalid_request_error"
        assert stage.backend.requests == []
