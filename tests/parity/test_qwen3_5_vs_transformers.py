"""The text model in a folder of Qwen3.5 whose tower is left alone, dense or with experts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jax_agent_rl.errors import ModelError
from jax_agent_rl.jetstream.engine import EngineShapes, JaxEngine
from jax_agent_rl.jetstream.scheduler import Scheduler
from jax_agent_rl.models.config import Params
from jax_agent_rl.models.decoder import Decoder
from jax_agent_rl.models.hf import check_files, load_hf, save_hf
from jax_agent_rl.rollout.protocol import GenerateRequest
from jax_agent_rl.testing.conformance.models import log_softmax
from jax_agent_rl.types import SamplingParams
from tests.driven_engine import finished
from tests.messages import raises
from tests.tiny import QWEN3_5_MOE, tiny_params

torch = pytest.importorskip("torch")


class InFloat64(torch.overrides.TorchFunctionMode):
    """Computes in float64 what a model asks float32 for: norms, decays, states, routers."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.float:
            function = torch.Tensor.double

        def widened(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        wide_kwargs = {name: widened(value) for name, value in (kwargs or {}).items()}
        return function(*map(widened, args), **wide_kwargs)


def logits_in_float64(model: Any, ids: np.ndarray) -> np.ndarray:
    """Logits [B, T, V] of a model's weights, every step of them in float64."""
    torch.set_default_dtype(torch.float64)
    try:
        with InFloat64(), torch.no_grad():
            # torch's grouped products of experts lack float64.
            options = {"experts_implementation": "eager", "dtype": torch.float64}
            wide = type(model)._from_config(model.config, **options).eval().double()
            wide.load_state_dict(model.state_dict())
            return wide(torch.tensor(ids)).logits.numpy()
    finally:
        torch.set_default_dtype(torch.float32)


TEXT: dict[str, Any] = {
    "vocab_size": 89,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
}
FEED_FORWARD = {
    "Qwen3_5": {"intermediate_size": 48},
    "Qwen3_5Moe": {
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
        "num_experts": 6,
        "num_experts_per_tok": 2,
    },
}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
IDS = np.random.default_rng(0).integers(3, 89, (2, 70))  # longer than a chunk


@pytest.fixture(scope="module", params=list(FEED_FORWARD))
def published(request, tmp_path_factory):
    """A folder as published ones, and the logits of its text model in float32 and in float64."""
    import transformers

    name = request.param
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        text_config=TEXT | FEED_FORWARD[name], vision_config=VISION
    )
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    for parameter in model.parameters():
        # Norms and decays far from where training starts.
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, std=0.3)
    with torch.no_grad():
        logits = model(torch.tensor(IDS)).logits.numpy()
    exact = logits_in_float64(model, IDS)
    assert exact.dtype == np.float64
    folder = tmp_path_factory.mktemp(name)
    model.save_pretrained(folder)

    # transformers neither reads nor writes the layers that predict further tokens.
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["mtp.norm.weight"] = np.ones(32, np.float32)
    tensors["mtp.layers.0.mlp.experts.down_proj"] = np.ones((6, 32, 16), np.float32)
    tensors["mtp.layers.0.mlp.experts.gate_up_proj"] = np.ones((6, 32, 32), np.float32)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder, logits, exact


@pytest.fixture
def text_folder(published, tmp_path: Path) -> Path:
    """The same folder, of which the text model is read."""
    folder, _, _ = published
    copy = tmp_path / "text only"
    copy.mkdir()
    (copy / "model.safetensors").symlink_to(folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(raw | {"language_model_only": True}))
    return copy


@pytest.mark.parametrize("text_only", [True, False])
def test_a_folder_has_the_logits_of_its_text_model(published, text_folder: Path, text_only: bool):
    folder, theirs, exact = published
    tensors = load_file(folder / "model.safetensors")
    assert "model.visual.pos_embed.weight" in tensors
    assert "model.language_model.layers.0.linear_attn.in_proj_qkv.weight" in tensors

    chosen = text_folder if text_only else folder
    config, params = load_hf(chosen)
    assert check_files(chosen) == config
    assert (config.vision is None) == ("vision" not in params) == text_only
    assert config.family.endswith("_text") == text_only

    @jax.jit
    def logits(params: Params) -> jax.Array:
        decoder = Decoder.from_params(config, params)
        return decoder.logits(decoder(jnp.asarray(IDS))[0])

    # At one token of the mixture transformers is off by 1.1e-4 and ours by 4e-5, the other way.
    np.testing.assert_allclose(logits(params), exact, atol=8e-5)
    np.testing.assert_allclose(theirs, exact, atol=2e-4)


def sampled_logprobs(logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Log-probs of the ids after the prompts [B, N], float64, of logits [B, T, V]."""
    scores = log_softmax(np.asarray(logits, np.float64))[:, PROMPT_LENGTH - 1 : -1]
    return np.take_along_axis(scores, ids[:, PROMPT_LENGTH:, None], axis=-1)[..., 0]


PROMPT_LENGTH = 40
FOUR_LAYERS = replace(
    QWEN3_5_MOE,
    vocab_size=512,
    num_layers=4,
    delta_net=replace(QWEN3_5_MOE.delta_net, layers=(True, True, True, False)),
    # All experts are chosen: rounding chooses no others.
    experts=replace(QWEN3_5_MOE.experts, count=3, per_token=3),
)


def test_engine_and_learner_are_as_near_to_float64_as_transformers(tmp_path: Path):
    import transformers

    config = FOUR_LAYERS
    params = tiny_params(config=config)
    save_hf(tmp_path, config, params)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()

    shapes = EngineShapes(
        max_model_len=96,
        max_concurrent_decodes=2,
        kv_cache_tokens=256,
        decode_steps=8,
        prefill_buckets=(64,),
    )
    engine = JaxEngine(config, shapes)
    on = Scheduler(engine, engine.load_params(params), version=1)
    prompts = np.random.default_rng(1).integers(3, 512, (2, PROMPT_LENGTH))
    for number, prompt in enumerate(prompts.tolist()):
        sampling = SamplingParams(max_tokens=48, temperature=1.0, seed=number, ignore_eos=True)
        request = GenerateRequest(
            request_id=str(number), prompt_ids=tuple(prompt), sampling=sampling
        )
        on.submit(request)
    outputs = finished(on)
    sampled = np.array([outputs["0"].token_ids, outputs["1"].token_ids])
    ids = np.concatenate([prompts, sampled], axis=1)

    decoder = Decoder.from_params(config, params)
    learner_logits = jax.jit(lambda ids: decoder.logits(decoder(ids)[0]))(jnp.asarray(ids))
    with torch.no_grad():
        their_logits = model(torch.tensor(ids)).logits.numpy()
    exact = sampled_logprobs(logits_in_float64(model, ids), ids)
    log_probs = {
        "engine": np.array([outputs["0"].log_probs, outputs["1"].log_probs]),
        "learner": sampled_logprobs(learner_logits, ids),
        "transformers": sampled_logprobs(their_logits, ids),
    }
    # Measured: 6e-5, 6e-5 and 8e-5 at most, and 3e-6 in the median.
    for name, values in log_probs.items():
        errors = np.abs(values - exact)
        assert errors.max() < 5e-4, name
        assert np.median(errors) < 1e-5, name


def test_a_tensor_of_neither_tower_nor_text_model_is_refused(text_folder: Path, tmp_path: Path):
    name = "model.language_model.layers.0.linear_attn.in_proj_ba.weight"
    tensors = load_file(text_folder / "model.safetensors")
    tensors[name] = np.ones((8, 32), np.float32)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((text_folder / "config.json").read_text())
    with raises(ModelError, value="layers.0.linear_attn.in_proj_ba.weight"):
        load_hf(tmp_path)


def test_a_written_text_model_has_its_logits_in_transformers(
    published, text_folder: Path, tmp_path: Path
):
    import transformers

    _, expected, _ = published
    config, params = load_hf(text_folder)
    save_hf(tmp_path / "text", config, params)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text").eval()
    with torch.no_grad():
        logits = model(torch.tensor(IDS)).logits.numpy()
    np.testing.assert_allclose(logits, expected, atol=1e-4)
