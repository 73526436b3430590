"""The learner's tower in a real vLLM: sampled there, trained here, published and proved there."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.config import AlgorithmConfig, LearnerConfig
from jax_agent_rl.learner.learner import Learner
from jax_agent_rl.models.hf import load_hf, save_hf
from jax_agent_rl.models.vision_context import VisionProcessor
from jax_agent_rl.runtime.transports import FileTransport
from jax_agent_rl.types import FinishReason, Group, Trajectory, Turn
from tests.gpu_backend.conftest import request, running
from tests.gpu_backend.vision import VisionReference, picture, write_model

pytestmark = pytest.mark.asyncio(loop_scope="session")
pytest.importorskip(
    "torchvision", reason="transformers' video processor needs torchvision (third_party/vllm.md)"
)


async def test_an_update_of_tower_and_decoder_reaches_vllm(tmp_path: Path):
    folder = write_model(tmp_path / "model", 0)
    config, params = load_hf(folder)
    codec = ChatCodec.from_pretrained(folder)
    learner = Learner(
        config,
        params,
        algorithm=AlgorithmConfig(adv_estimator="dr_grpo"),
        config=LearnerConfig(learning_rate=1e-2, pack_length=128, row_patches=64),
        temperature=1.0,
        vision_processor=VisionProcessor.of(config, folder),
    )
    media = {
        "image": (picture(1),),
        "video": (tuple(picture(seed, 60, 60) for seed in range(10, 14)),),
    }
    message = {"role": "user", "content": "what?", "media": ["image", "video"]}
    multimodal = codec.expand_media(codec.encode_prompt([message]), media)
    async with running(folder, multi_modal={"image": 1, "video": 1}) as backend:

        async def sampled(name: str, seed: int) -> Trajectory:
            """Some text, then the pictures, then more text."""
            first = await backend.generate(
                request(f"{name}-0", [5, 6, 7], max_tokens=3, temperature=1.0, seed=seed)
            )
            context = (5, 6, 7, *first.token_ids, *multimodal)
            last = await backend.generate(
                request(
                    f"{name}-1",
                    context,
                    max_tokens=6,
                    multi_modal=media,
                    temperature=1.0,
                    seed=seed,
                )
            )
            turns = (
                Turn(output=first, appended_ids=tuple(multimodal), appended_media=media),
                Turn(output=last),
            )
            return Trajectory.from_turns(
                prompt_ids=(5, 6, 7),
                turns=turns,
                trajectory_id=name,
                group_id="g",
                agent_name="tool_agent",
                finish_reason=FinishReason.ANSWER,
            )

        members = [await sampled("a", 1), replace(await sampled("b", 2), reward=1.0)]
        result = learner.update([Group(group_id="g", trajectories=tuple(members))])
        assert result.metrics["logprob_gap_max"] < 5e-4
        old_merger = np.asarray(params["vision"]["merger_out"])
        assert np.abs(np.asarray(learner.params["vision"]["merger_out"]) - old_merger).max() > 1e-3

        files = FileTransport(config, probe_ids=[list(range(40, 70))])
        try:
            await backend.update_weights(files.write(learner.params, 2))
        finally:
            files.release()
        output = await backend.generate(request("after", multimodal, multi_modal=media))
    save_hf(tmp_path / "updated", config, learner.params, tokenizer_from=folder)
    expected, values = VisionReference(tmp_path / "updated").greedy(multimodal, media, 8)
    assert list(output.token_ids) == expected
    np.testing.assert_allclose(output.log_probs, values, atol=5e-4)
