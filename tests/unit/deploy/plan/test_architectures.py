"""Well-known models that are planned without their files."""

import math
from pathlib import Path

import jax
import pytest
from typer.testing import CliRunner

from jax_agent_rl import cli
from jax_agent_rl.deploy.plan.architectures import ARCHITECTURES, architecture_folder
from jax_agent_rl.deploy.plan.result import PlanResult
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.models.hf import load_config
from tests.messages import raises

# Parameters in billions, from the models' cards (Qwen, Llama, Mistral, GLM, SmolLM2, OLMo),
# Gemma 3's report (embeddings and the rest) and those of gpt-oss (table 1), DeepSeek-V3 and Kimi
# K2. GLM-4.5 and MiniMax M2 as their makers round them. Layers, widths, heads and experts: what
# transformers has by default (DEFAULTS below); of OLMo 3, olmo3_7B and olmo3_32B of OLMo-core
# (src/olmo_core/nn/transformer/config.py); of GLM-4.6, the config of GLM-4.5 355B in the tests of
# NVIDIA's Megatron-Bridge.
PUBLISHED = {
    "qwen2.5-0.5b": 0.49, "qwen2.5-1.5b": 1.54, "qwen2.5-3b": 3.09, "qwen2.5-7b": 7.61,
    "qwen2.5-14b": 14.7, "qwen2.5-32b": 32.5, "qwen2.5-72b": 72.7, "qwen3-0.6b": 0.6,
    "qwen3-1.7b": 1.7, "qwen3-4b": 4.0, "qwen3-8b": 8.2, "qwen3-14b": 14.8, "qwen3-32b": 32.8,
    "qwen3-30b-a3b": 30.5, "llama-3.2-1b": 1.23, "llama-3.2-3b": 3.21, "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.6, "llama-3.3-70b": 70.6, "gemma-3-1b": 1.0, "gemma-3-4b": 3.88,
    "mistral-7b": 7.25, "mistral-nemo-12b": 12.2, "mistral-small-24b": 23.6, "ministral-8b": 8.02,
    "glm-4-9b": 9.4, "glm-4-32b": 32.6, "gpt-oss-20b": 20.91, "gpt-oss-120b": 116.83,
    "gemma-3-12b": 11.77, "gemma-3-27b": 27.0, "smollm2-135m": 0.135, "smollm2-360m": 0.362,
    "smollm2-1.7b": 1.71, "gemma-4-31b": 30.7, "gemma-4-e2b": 4.63, "gemma-4-26b-a4b": 25.2,
    "glm-4.5-air": 106, "glm-4.6": 355, "minimax-m2": 230, "deepseek-v3": 671, "kimi-k2": 1040,
    "olmo-3-7b": 7.3, "olmo-3-32b": 32.2,
    "qwen3-next-80b-a3b": 79.7, "qwen3.5-9b": 9.0, "qwen3.5-35b-a3b": 34.7,
}  # fmt: skip


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_model_has_the_published_number_of_parameters(name: str):
    with architecture_folder(name) as folder:
        shapes = load_config(folder).parameter_shapes()
    count = sum(
        math.prod(shape)
        for shape in jax.tree.leaves(shapes, is_leaf=lambda x: isinstance(x, tuple))
    )
    assert count / 1e9 == pytest.approx(PUBLISHED[name], rel=0.02)
    assert not folder.exists()


DEFAULTS = {
    "qwen3.5-9b": "Qwen3_5TextConfig",
    "qwen3.5-35b-a3b": "Qwen3_5MoeTextConfig",
    "qwen3-next-80b-a3b": "Qwen3NextConfig",
    "glm-4.5-air": "Glm4MoeConfig",
    "deepseek-v3": "DeepseekV3Config",
    "minimax-m2": "MiniMaxM2Config",
    "gpt-oss-120b": "GptOssConfig",
}
"""Models whose sizes are the defaults of a config of transformers."""
NO_SIZES = {"attention_bias", "eos_token_id", "max_position_embeddings"}


@pytest.mark.parametrize("name", DEFAULTS)
def test_sizes_are_those_that_transformers_has_by_default(name: str):
    transformers = pytest.importorskip("transformers")
    defaults = getattr(transformers, DEFAULTS[name])().to_dict()
    sizes = {}
    for field, value in ARCHITECTURES[name].items():
        # All layers of Qwen's mixtures have experts.
        is_unused = field == "intermediate_size" and "num_experts" in ARCHITECTURES[name]
        if field in defaults and field not in NO_SIZES and not is_unused:
            sizes[field] = value
    assert sizes == {field: defaults[field] for field in sizes}
    assert len(sizes) > 10


def test_an_unknown_name_is_refused_with_the_nearest_and_all_there_are():
    with raises(ConfigError, fix=("qwen3-8b", "smollm2-135m", "config.json")):
        architecture_folder("Qwen3-8").__enter__()


def test_the_command_plans_it_in_place_of_the_configured_model(monkeypatch, tmp_path: Path):
    planned = []

    def run(task, console, **options):
        (path,) = [
            item.removeprefix("model.path=")
            for item in task.overrides
            if item.startswith("model.path=")
        ]
        planned.append(load_config(path))
        return PlanResult(report="", json={"fits": True})

    monkeypatch.setattr("jax_agent_rl.deploy.plan.command.run_command", run)
    arguments = ["plan", "quickstart", "--topology", "v5e:2x2", "--architecture", "Qwen3-30B-A3B"]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    assert planned[0].num_layers == 48
    assert planned[0].experts.count == 128
