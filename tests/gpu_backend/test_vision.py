"""Images and videos through a real vLLM, on a tiny random Qwen2.5-VL; the reference is
transformers.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from safetensors.numpy import load_file, save_file

from gpu_backend.backend import VllmBackend
from jax_agent_rl.agents import AgentContext
from jax_agent_rl.agents.tool_agent import ToolAgent
from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.chat.reply import Reply
from jax_agent_rl.config import AgentConfig
from jax_agent_rl.errors import BackendError, ConfigError, TokenDriftError, WeightUpdateError
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.http.client import RemoteBackend
from jax_agent_rl.rollout.http.server import RolloutServer
from jax_agent_rl.rollout.protocol import FILES, WeightUpdate
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.tools.base import BaseTool, ToolResponse
from jax_agent_rl.tools.registry import ToolRegistry
from jax_agent_rl.types import SamplingParams, digest_ids
from jax_agent_rl.utils.weight_transfer import LogprobProbe
from tests.agent_testbed import episode_request
from tests.gpu_backend.conftest import request, running
from tests.gpu_backend.vision import IMAGE, VisionReference, picture, positions, write_model
from tests.messages import raises

pytestmark = pytest.mark.asyncio(loop_scope="session")
pytest.importorskip(
    "torchvision", reason="transformers' video processor needs torchvision (third_party/vllm.md)"
)
LIMITS = {"image": 2, "video": 1}
CLIP = tuple(picture(seed, 60, 60) for seed in range(10, 15))


@dataclass
class Seeing:
    """An engine that takes pictures, what made it, and its codec."""

    backend: VllmBackend
    folder: Path
    codec: ChatCodec

    def prompt(self, media: Mapping[str, Sequence[Any]], text: str = "what is this?") -> list[int]:
        """Ids of a user's message that shows these."""
        kinds = [kind for kind, items in media.items() for _ in items]
        message = (
            {"role": "user", "content": text, "media": kinds}
            if kinds
            else {"role": "user", "content": text}
        )
        return self.codec.expand_media(self.codec.encode_prompt([message]), media)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of one kind, that differ in every tensor."""
    return [write_model(tmp_path_factory.mktemp("vision") / str(seed), seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def references(folders: list[Path]) -> list[VisionReference]:
    return [VisionReference(folder) for folder in folders]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def seeing(folders: list[Path]) -> AsyncIterator[Seeing]:
    async with running(folders[0], multi_modal=LIMITS) as backend:
        yield Seeing(backend, folders[0], ChatCodec.from_pretrained(folders[0]))


@pytest.mark.parametrize(
    "media",
    [
        {"image": (picture(1),)},
        {"image": (picture(1), picture(2, 40, 120))},
        {"video": (CLIP,)},
        {"image": (picture(1),), "video": (CLIP[:4],)},
        {},
    ],
    ids=["image", "two images", "video", "both", "text"],
)
async def test_the_engine_says_what_transformers_says(seeing: Seeing, references, media: dict):
    prompt = seeing.prompt(media)
    expected, values = references[0].greedy(prompt, media, 8)
    output = await seeing.backend.generate(request("r", prompt, multi_modal=media))
    assert list(output.token_ids) == expected
    np.testing.assert_allclose(output.log_probs, values, atol=5e-4)
    assert output.context_digest == digest_ids([*prompt, *output.token_ids])


async def test_positions_of_a_picture_are_those_of_transformers(references):
    """They differ for videos alone."""
    import torch

    ids = [5, IMAGE, IMAGE, IMAGE, IMAGE, 6, 7]
    theirs, _ = references[0].model.model.get_rope_index(
        torch.tensor([ids]),
        mm_token_type_ids=torch.tensor([[int(i == IMAGE) for i in ids]]),
        image_grid_thw=torch.tensor([[1, 4, 4]]),
    )
    assert theirs[:, 0].tolist() == positions(ids, {IMAGE: [(1, 2, 2)]})


async def test_another_picture_is_another_distribution(seeing: Seeing, references):
    """The ids are the same, but neither KV nor features of the first picture are taken for it."""
    first = {"image": (picture(1),)}
    second = {"image": (picture(2),)}
    prompt = seeing.prompt(first)
    assert prompt == seeing.prompt(second)
    values = [
        (
            await seeing.backend.generate(request(f"r{i}", prompt, multi_modal=media, max_tokens=1))
        ).log_probs
        for i, media in enumerate((first, second, first))
    ]
    assert values[0] == values[2]
    expected = [references[0].greedy(prompt, media, 1)[1] for media in (first, second)]
    np.testing.assert_allclose(values[:2], expected, atol=5e-4)
    assert abs(expected[0][0] - expected[1][0]) > 1e-2


async def test_a_placeholder_that_is_not_written_out_is_refused(seeing: Seeing):
    media = {"image": (picture(1),)}
    message = {"role": "user", "content": "x", "media": ["image"]}
    with raises(TokenDriftError, key="image placeholders", value=(1, 4)):
        await seeing.backend.generate(
            request("r", seeing.codec.encode_prompt([message]), multi_modal=media)
        )
    assert (await seeing.backend.health()).running == 0


async def test_a_picture_of_another_size_than_was_counted_is_refused(seeing: Seeing):
    prompt = seeing.prompt({"image": (picture(1),)})
    with raises(TokenDriftError, key="image placeholders", value=(4, 8)):
        await seeing.backend.generate(
            request("r", prompt, multi_modal={"image": (picture(1, 112, 56),)})
        )


async def test_a_placeholder_the_model_sampled_is_text_and_never_changes_the_ids(seeing: Seeing):
    media = {"image": (picture(1),)}
    prompt = seeing.prompt(media)
    output = await seeing.backend.generate(
        request("after", [*prompt, IMAGE, IMAGE], multi_modal=media)
    )
    assert output.context_digest == digest_ids([*prompt, IMAGE, IMAGE, *output.token_ids])
    with pytest.raises(TokenDriftError):
        await seeing.backend.generate(request("before", [IMAGE, 5, *prompt], multi_modal=media))


async def test_pictures_travel_over_http(seeing: Seeing):
    media = {"image": (picture(1),), "video": (CLIP[:4],)}
    prompt = seeing.prompt(media)
    local = await seeing.backend.generate(request("here", prompt, multi_modal=media))
    server = RolloutServer(seeing.backend)
    await server.start()
    remote = RemoteBackend(server.url)
    try:
        await remote.start()
        assert remote.capabilities.multi_modal == LIMITS.keys()
        client = LLMServerClient([AsyncServer(remote)])
        sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        over_http = await client.generate(
            "there",
            prompt_ids=prompt,
            sampling_params=sampling,
            image_data=media["image"],
            video_data=media["video"],
        )
        with raises(TokenDriftError, key="image placeholders", value=(4, 8)):
            await remote.generate(
                request("r", prompt, multi_modal=media | {"image": (picture(1, 112, 56),)})
            )
    finally:
        await remote.close()
        await server.close()
    assert over_http.token_ids == local.token_ids
    assert over_http.context_digest == local.context_digest
    np.testing.assert_allclose(over_http.log_probs, local.log_probs, atol=1e-4)


async def test_more_pictures_than_the_engine_takes_are_refused_with_the_key(seeing: Seeing):
    media = {"image": (picture(1),) * 3}
    named = ("3 of kind 'image'", "takes 2")
    with raises(BackendError, value=named, fix="vllm.multi_modal.image"):
        await seeing.backend.generate(request("r", seeing.prompt(media), multi_modal=media))


async def test_what_is_no_picture_is_refused(seeing: Seeing):
    prompt = seeing.prompt({"image": (picture(1),)})
    with raises(BackendError, value="str", fix="PIL image"):
        await seeing.backend.generate(request("r", prompt, multi_modal={"image": ("cat.png",)}))


class Camera(BaseTool):
    """Shows a picture."""

    def __init__(self) -> None:
        super().__init__(name="camera", description="", parameters={"type": "object"})

    async def execute(
        self, instance_id: str, arguments: Any, **execute_kwargs: Any
    ) -> ToolResponse:
        return ToolResponse(text="look", image=(picture(1),))


class CallingCodec(ChatCodec):
    """A random model calls nothing: its first turn is read as if it did."""

    def parse_reply(
        self,
        sampled_ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        context_ids: Sequence[int] | None = None,
    ) -> Any:
        reply = super().parse_reply(sampled_ids, tools)
        call = self._format.parse(
            '<tool_call>{"name": "camera", "arguments": {}}</tool_call>', ()
        ).tool_calls
        return Reply(reply.content, tool_calls=call)


async def test_a_tools_picture_is_part_of_the_trajectory_id_by_id(seeing: Seeing, references):
    context = AgentContext(
        client=LLMServerClient([AsyncServer(seeing.backend)]),
        codec=CallingCodec.from_pretrained(seeing.folder),
        tools=ToolRegistry([Camera()]),
        limits=AgentConfig(tool_prompt="none", max_assistant_turns=2, max_response_length=150),
        max_model_len=256,
    )
    row = {"prompt": [{"role": "user", "content": "go"}]}
    sampling = SamplingParams(max_tokens=12, temperature=0.0, stop_token_ids=tuple(range(256)))
    trajectory = await ToolAgent(context).play(episode_request(row, sampling))
    first, second = trajectory.turns
    assert first.appended_ids.count(IMAGE) == 4
    assert trajectory.multi_modal.keys() == {"image"}
    context_ids = [*trajectory.prompt_ids, *first.output.token_ids, *first.appended_ids]
    expected, values = references[0].greedy(context_ids, trajectory.multi_modal, 1)
    assert list(second.output.token_ids) == expected
    np.testing.assert_allclose(second.output.log_probs, values, atol=5e-4)


TEXT = list(range(40, 70))


def update_of(
    source: Path, target: Path, probe: LogprobProbe, version: int, *, only: str = ""
) -> WeightUpdate:
    """The tensors of a model folder whose names begin with ``only``."""
    tensors = {
        name: t
        for name, t in load_file(source / "model.safetensors").items()
        if name.startswith(only)
    }
    save_file(tensors, target / f"{version}.safetensors")
    path = str(target / f"{version}.safetensors")
    return WeightUpdate(
        version=version, kind=FILES, payload=[path], partial=bool(only), probe=probe
    )


async def test_updates_reach_language_and_vision_and_old_pictures_are_forgotten(
    seeing: Seeing, folders, references, tmp_path: Path
):
    backend = seeing.backend
    media = {"image": (picture(1),)}
    prompt = seeing.prompt(media)

    async def says() -> float:
        return (
            await backend.generate(request("r", prompt, multi_modal=media, max_tokens=1))
        ).log_probs[0]

    values = [await says()]
    old, new = (reference.probe(TEXT) for reference in references)
    # The text is all that a text probe can prove: that the vision tower arrived is proved by
    # reading it back.
    await backend.update_weights(update_of(folders[1], tmp_path, old, 2, only="visual."))
    values.append(await says())
    await backend.update_weights(update_of(folders[1], tmp_path, new, 3))
    values.append(await says())
    await backend.update_weights(update_of(folders[0], tmp_path, old, 4))
    values.append(await says())
    mixed = VisionReference(folders[0])
    mixed.model.model.visual.load_state_dict(references[1].model.model.visual.state_dict())
    expected = [
        r.greedy(prompt, media, 1)[1][0]
        for r in (references[0], mixed, references[1], references[0])
    ]
    np.testing.assert_allclose(values, expected, atol=5e-4)
    assert len({round(value, 2) for value in expected}) == 3


async def test_a_vision_tensor_that_did_not_land_is_named(
    seeing: Seeing, folders, references, tmp_path, monkeypatch
):
    placements = seeing.backend.updater.placements
    name = "visual.blocks.1.mlp.up_proj.weight"
    parameter, first, *layout = placements[name]
    monkeypatch.setitem(placements, name, (parameter, first - 1, *layout))
    version = seeing.backend.policy_version
    probe = references[0].probe(TEXT)
    with pytest.raises(WeightUpdateError, match=name):
        await seeing.backend.update_weights(update_of(folders[0], tmp_path, probe, version + 1))
    monkeypatch.undo()
    await seeing.backend.update_weights(update_of(folders[0], tmp_path, probe, version + 2))
    assert (await seeing.backend.health()).ok


async def test_pixels_are_one_setting_for_the_engine_and_the_count(folders):
    media = {"image": (picture(1, 224, 224),)}
    pixels = (56 * 56, 84 * 84)
    async with running(folders[0], multi_modal={"image": 1}, pixels=pixels) as backend:
        assert backend.capabilities.multi_modal == {"image"}
        engine = Seeing(backend, folders[0], ChatCodec.from_pretrained(folders[0], pixels=pixels))
        prompt = engine.prompt(media)
        output = await backend.generate(request("r", prompt, multi_modal=media))
        assert prompt.count(IMAGE) == 9
        assert output.context_digest == digest_ids([*prompt, *output.token_ids])
        seeing = Seeing(backend, folders[0], ChatCodec.from_pretrained(folders[0]))
        with raises(TokenDriftError, key="image placeholders", value=(16, 9)):
            await backend.generate(request("s", seeing.prompt(media), multi_modal=media))


async def test_a_vision_model_needs_a_limit_of_images_per_prompt(folders):
    with raises(ConfigError, value="image and video", fix="rollout.vllm.multi_modal.image=1"):
        async with running(folders[0]):
            pass


async def test_a_model_without_eyes_takes_no_pictures(model_folder: Path):
    with raises(ConfigError, key="rollout.vllm.multi_modal", value="['image']", fix="remove"):
        async with running(model_folder, multi_modal={"image": 1}):
            pass
