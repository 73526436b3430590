"""Which weight updates fit a model, and where their tensors must be found; vLLM itself is not
needed.
"""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gpu_backend.settings import VllmSettings
from gpu_backend.weight_mapping import Checkpoint, read_shapes
from gpu_backend.weight_updates import WeightUpdater
from jax_agent_rl.errors import ConfigError, ModelError, WeightUpdateError
from jax_agent_rl.models.hf import save_hf
from jax_agent_rl.rollout.protocol import WeightUpdate
from jax_agent_rl.runtime.transports import FileTransport
from jax_agent_rl.utils.weight_transfer import LogprobProbe
from tests.messages import raises
from tests.tiny import TINY, logprobs_of, tiny_params

PROBE = LogprobProbe(ids=((3, 4, 5),), log_probs=((-1.0, -2.0),))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_hf(path, TINY, tiny_params())
    return path


@pytest.fixture
def checkpoint(folder: Path) -> Checkpoint:
    return Checkpoint.read(folder)


@pytest.fixture
def updater(checkpoint: Checkpoint) -> WeightUpdater:
    settings = VllmSettings(model="m", max_model_len=60)
    return WeightUpdater(None, checkpoint, settings, "cpu")


def write(path: Path, shapes: dict) -> str:
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, path)
    return str(path)


def test_a_model_folder_says_what_an_update_consists_of(checkpoint: Checkpoint):
    assert checkpoint.shapes["model.embed_tokens.weight"] == (97, 32)
    assert len(checkpoint.shapes) == 2 + 3 * 9
    assert checkpoint.eos_token_ids == {2}
    assert checkpoint.optional == {"lm_head.weight"}


def test_a_head_of_its_own_is_part_of_an_update(folder: Path, tmp_path: Path):
    """vLLM unties a head that differs from the embeddings; one that repeats them stays tied."""
    copy = shutil.copytree(folder, tmp_path / "model")
    tensors = load_file(copy / "model.safetensors")
    for head, optional in (
        (-tensors["model.embed_tokens.weight"], set()),
        (None, {"lm_head.weight"}),
    ):
        head_weights = tensors["model.embed_tokens.weight"].copy() if head is None else head
        save_file(tensors | {"lm_head.weight": head_weights}, copy / "model.safetensors")
        assert Checkpoint.read(copy).optional == optional


def test_fused_parts_stand_below_each_other(checkpoint: Checkpoint):
    placements = checkpoint.placements()
    layer = "model.layers.1.self_attn"
    assert placements[f"{layer}.q_proj.weight"] == (f"{layer}.qkv_proj.weight", 0, 32, False, None)
    assert placements[f"{layer}.k_proj.weight"] == (f"{layer}.qkv_proj.weight", 32, 16, False, None)
    assert placements[f"{layer}.v_proj.weight"] == (f"{layer}.qkv_proj.weight", 48, 16, False, None)
    assert placements["model.layers.0.mlp.up_proj.weight"] == (
        "model.layers.0.mlp.gate_up_proj.weight",
        48,
        48,
        False,
        None,
    )
    assert placements["model.norm.weight"] == ("model.norm.weight", 0, 32, False, None)


def model_folder(path: Path, shapes: dict, **config) -> Path:
    write(path / "model.safetensors", shapes)
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_gpt2_stores_its_matrices_transposed(tmp_path: Path):
    shapes = {
        "h.0.attn.c_attn.weight": (8, 24),
        "h.0.attn.c_attn.bias": (24,),
        "wte.weight": (50, 8),
    }
    placements = Checkpoint.read(
        model_folder(tmp_path, shapes, architectures=["GPT2LMHeadModel"])
    ).placements()
    assert placements["h.0.attn.c_attn.weight"] == (
        "transformer.h.0.attn.c_attn.weight",
        0,
        24,
        True,
        None,
    )
    assert placements["h.0.attn.c_attn.bias"] == (
        "transformer.h.0.attn.c_attn.bias",
        0,
        24,
        False,
        None,
    )
    assert placements["wte.weight"] == ("transformer.wte.weight", 0, 50, False, None)


def test_experts_of_minimax_m2_have_other_names(tmp_path: Path):
    experts = "model.layers.0.block_sparse_moe.experts"
    correction = "model.layers.0.block_sparse_moe.e_score_correction_bias"
    shapes = {f"{experts}.{e}.{m}.weight": (6, 8) for e in (0, 1) for m in ("w1", "w3")}
    shapes |= {f"{experts}.{e}.w2.weight": (8, 6) for e in (0, 1)} | {correction: (2,)}
    placements = Checkpoint.read(
        model_folder(tmp_path, shapes, architectures=["MiniMaxM2ForCausalLM"])
    ).placements()
    stack = f"{experts}.routed_experts"
    assert placements[f"{experts}.1.w1.weight"] == (f"{stack}.w13_weight", 0, 6, False, 1)
    assert placements[f"{experts}.1.w3.weight"] == (f"{stack}.w13_weight", 6, 6, False, 1)
    assert placements[f"{experts}.0.w2.weight"] == (f"{stack}.w2_weight", 0, 8, False, 0)
    assert placements[correction] == (correction, 0, 2, False, None)


def test_a_shared_expert_is_a_dense_network_and_further_predictions_are_no_part(tmp_path: Path):
    mlp = "model.layers.1.mlp"
    shapes = {
        f"{mlp}.shared_experts.gate_proj.weight": (6, 8),
        f"{mlp}.shared_experts.up_proj.weight": (6, 8),
        f"{mlp}.gate.e_score_correction_bias": (4,),
        "model.layers.2.eh_proj.weight": (8, 16),
        "model.layers.2.mlp.gate.weight": (4, 8),
    }
    placements = Checkpoint.read(
        model_folder(tmp_path, shapes, architectures=["Glm4MoeForCausalLM"])
    ).placements()
    fused = f"{mlp}.shared_experts.gate_up_proj.weight"
    assert placements == {
        f"{mlp}.shared_experts.gate_proj.weight": (fused, 0, 6, False, None),
        f"{mlp}.shared_experts.up_proj.weight": (fused, 6, 6, False, None),
        f"{mlp}.gate.e_score_correction_bias": (
            f"{mlp}.gate.e_score_correction_bias",
            0,
            4,
            False,
            None,
        ),
    }


def test_experts_stand_in_one_stack_gate_above_up(tmp_path: Path):
    experts = "model.layers.0.mlp.experts"
    shapes = {f"{experts}.{e}.{m}_proj.weight": (6, 8) for e in (0, 1) for m in ("gate", "up")}
    shapes |= {f"{experts}.{e}.down_proj.weight": (8, 6) for e in (0, 1)}
    placements = Checkpoint.read(
        model_folder(tmp_path, shapes, architectures=["Qwen3MoeForCausalLM"])
    ).placements()
    stack = f"{experts}.routed_experts"
    assert placements[f"{experts}.1.gate_proj.weight"] == (f"{stack}.w13_weight", 0, 6, False, 1)
    assert placements[f"{experts}.1.up_proj.weight"] == (f"{stack}.w13_weight", 6, 6, False, 1)
    assert placements[f"{experts}.0.down_proj.weight"] == (f"{stack}.w2_weight", 0, 8, False, 0)


@pytest.mark.parametrize("language", ["model", "model.language_model"])
@pytest.mark.parametrize("visual", ["visual", "model.visual"])
def test_updates_have_published_names_whatever_the_served_folder_has(
    tmp_path: Path, language: str, visual: str
):
    shapes = {
        f"{language}.layers.0.self_attn.q_proj.bias": (8,),
        f"{language}.layers.0.self_attn.k_proj.bias": (4,),
        f"{visual}.blocks.0.attn.qkv.weight": (24, 8),
        f"{visual}.blocks.0.mlp.gate_proj.bias": (6,),
        f"{visual}.blocks.0.mlp.up_proj.bias": (6,),
        "lm_head.weight": (50, 8),
    }
    ids = {"image_token_id": 7, "video_token_id": 8, "text_config": {"eos_token_id": 2}}
    folder = model_folder(
        tmp_path, shapes, architectures=["Qwen2_5_VLForConditionalGeneration"], **ids
    )
    checkpoint = Checkpoint.read(folder)
    assert checkpoint.placeholders == {"image": 7, "video": 8}
    assert checkpoint.eos_token_ids == {2}
    placements = checkpoint.placements()
    assert {name: place[:3] for name, place in placements.items()} == {
        "model.layers.0.self_attn.q_proj.bias": (
            "language_model.model.layers.0.self_attn.qkv_proj.bias",
            0,
            8,
        ),
        "model.layers.0.self_attn.k_proj.bias": (
            "language_model.model.layers.0.self_attn.qkv_proj.bias",
            8,
            4,
        ),
        "visual.blocks.0.attn.qkv.weight": ("visual.blocks.0.attn.qkv.weight", 0, 24),
        "visual.blocks.0.mlp.gate_proj.bias": ("visual.blocks.0.mlp.gate_up_proj.bias", 0, 6),
        "visual.blocks.0.mlp.up_proj.bias": ("visual.blocks.0.mlp.gate_up_proj.bias", 6, 6),
        "lm_head.weight": ("language_model.lm_head.weight", 0, 50),
    }


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path: Path):
    model_folder(tmp_path, {"a": (1,)}, architectures=["MambaForCausalLM"])
    with pytest.raises(ConfigError, match=r"'MambaForCausalLM'.*LlamaForCausalLM"):
        Checkpoint.read(tmp_path)


def test_quantised_weights_and_missing_files_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="config.json"):
        Checkpoint.read(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ConfigError, match="no \\*.safetensors"):
        Checkpoint.read(tmp_path)
    model_folder(
        tmp_path, {"a": (1,)}, architectures=["LlamaForCausalLM"], quantization_config={"bits": 4}
    )
    with pytest.raises(ConfigError, match="quantised"):
        Checkpoint.read(tmp_path)


@pytest.mark.parametrize(
    ("change", "partial", "named"),
    [
        (lambda s: s | {"model.norm.bias": (32,)}, False, "['model.norm.bias']"),
        (lambda s: s | {"model.norm.weight": (31,)}, False, ("[31]", "[32]")),
        (lambda s: {k: v for k, v in s.items() if "layers.2" not in k}, False, "9 of 29"),
        (lambda s: {}, True, "no tensor"),
    ],
)
def test_an_update_that_does_not_fit_is_refused(
    checkpoint: Checkpoint, change, partial: bool, named
):
    with raises(WeightUpdateError, value=named):
        checkpoint.check(change(dict(checkpoint.shapes)), partial=partial)


def test_a_partial_update_may_name_some_tensors_only(checkpoint: Checkpoint):
    checkpoint.check({"model.norm.weight": (32,)}, partial=True)


def test_a_tied_output_matrix_may_come_along_or_not(checkpoint: Checkpoint):
    checkpoint.check(dict(checkpoint.shapes) | {"lm_head.weight": (97, 32)}, partial=False)


def test_a_damaged_file_is_named(tmp_path: Path):
    path = tmp_path / "weights.safetensors"
    write(path, {"a": (64,)})
    content = path.read_bytes()
    for damaged in (b"", b"\xff" * 20, content[:-4], content[:30]):
        path.write_bytes(damaged)
        with raises(ModelError, key="weights.safetensors"):
            read_shapes([path])
    with raises(ModelError, key="nowhere"):
        read_shapes([tmp_path / "nowhere"])


def test_a_tensor_in_two_files_is_refused(tmp_path: Path):
    paths = [write(tmp_path / name, {"a": (2,)}) for name in ("one", "two")]
    with raises(ModelError, key="two", value="'a'"):
        read_shapes(paths)


def test_a_probe_travels_as_json():
    assert LogprobProbe.from_json(json.loads(json.dumps(PROBE.to_json()))) == PROBE
    with pytest.raises(ValueError):
        LogprobProbe.from_json({"ids": [[1]], "log_probs": [[]]})


@pytest.mark.parametrize("ids", [(), ((1,),)])
def test_a_probe_that_proves_nothing_cannot_be_made(ids):
    with pytest.raises(ValueError):
        LogprobProbe(ids=ids, log_probs=tuple(() for _ in ids))


def test_differences_are_of_all_ids_and_nan_is_infinite():
    assert PROBE.differences([[-1.0, -2.5]]) == (0.5, 0.25)
    assert PROBE.differences([[math.nan, -2.0]])[0] == math.inf


def test_refusals_come_before_anything_is_touched(
    updater: WeightUpdater, folder: Path, tmp_path: Path
):
    path = str(folder / "model.safetensors")
    for update, named in [
        (
            WeightUpdate(version=3, kind="arrays", payload={}),
            ("['broadcast', 'safetensors']", "kind='arrays'"),
        ),
        (WeightUpdate(version=2, kind="safetensors", payload=[path]), "not newer than 2"),
        (WeightUpdate(version=3, kind="safetensors", payload=[path]), "no log-prob probe"),
        (WeightUpdate(version=3, kind="safetensors", payload=path), "list of file paths"),
        (
            WeightUpdate(
                version=3,
                kind="safetensors",
                payload=[path],
                digests={"model.safetensors": "xxh3_128:0"},
            ),
            ("model.safetensors", "not what the learner wrote"),
        ),
    ]:
        with raises(WeightUpdateError, value=named):
            updater.check(update, served=2)


def test_tolerances_follow_the_dtype():
    settings = VllmSettings(model="m", max_model_len=60)
    assert settings.tolerances("cpu") == (1e-3, 1e-4)
    assert settings.tolerances("cuda") == (0.5, 0.05)
    assert (
        VllmSettings(model="m", max_model_len=60, max_logprob_difference=0.1).tolerances("cpu")[0]
        == 0.1
    )


def test_the_learner_writes_all_weights_in_shards_with_its_own_log_probs(
    checkpoint: Checkpoint, tmp_path: Path
):
    params = tiny_params(5)
    ids = [7, 8, 9, 10, 3]
    files = FileTransport(TINY, probe_ids=[ids], folder=tmp_path, shard_bytes=6000)
    first = files.write(params, 1).payload
    update = files.write(params, 2)
    second = update.payload
    checkpoint.check(read_shapes(second), partial=False)
    probe = update.probe
    assert len(second) > 2
    assert not any(Path(path).exists() for path in first)
    assert probe is not None
    np.testing.assert_allclose(probe.log_probs[0], logprobs_of(params, ids[:1], ids[1:]), atol=2e-5)
    files.release()
    assert not list(tmp_path.iterdir())


def test_a_missing_weight_folder_is_a_config_error(tmp_path: Path):
    with pytest.raises(ConfigError, match="weight_dir"):
        FileTransport(TINY, probe_ids=[[3, 4]], folder=tmp_path / "nowhere")
