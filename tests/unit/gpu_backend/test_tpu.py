"""vLLM on TPUs with doubles of what tpu-inference 0.32.0 has: ``TPUModelRunner`` (model, state,
state_leaves, mesh, rng_key, vllm_config, refresh_state_leaves) and its two kinds of loaders. No
TPU, no vLLM.
"""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gpu_backend import tpu_weights
from gpu_backend.launch import check_tpu_settings
from gpu_backend.requests import vllm_sampling
from gpu_backend.settings import VllmSettings
from gpu_backend.weight_mapping import Checkpoint
from gpu_backend.weight_updates import WeightUpdater
from jax_agent_rl.errors import ConfigError, WeightUpdateError
from jax_agent_rl.jetstream.request import RunningRequest
from jax_agent_rl.models.hf import save_hf
from jax_agent_rl.rollout.protocol import GenerateRequest, WeightUpdate
from jax_agent_rl.types import SamplingParams
from tests.messages import raises
from tests.tiny import TINY, tiny_params

SETTINGS = VllmSettings(model="m", max_model_len=60)


class LoadableWithIterator:
    """The mixin's name is what tells its models from older ones."""


class Matrix(nnx.Module):
    def __init__(self):
        self.weight = nnx.Param(jnp.zeros((3, 2)))

    def take(self, tensors) -> None:
        for name, tensor in tensors:
            assert name == "weight"
            self.weight.set_value(jnp.asarray(tensor).T)


class NewModel(Matrix, LoadableWithIterator):
    def load_weights(self, weights):
        self.take(weights)
        return {"weight"}


class OldModel(Matrix):
    def __init__(self, config):
        super().__init__()
        self.config = nnx.static(config)

    def load_weights(self, rng_key):
        self.take(self.config.runai_model_weights_iterator)


@dataclass
class Runner:
    """``TPUModelRunner``."""

    model: nnx.Module
    vllm_config: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(model_config=SimpleNamespace())
    )

    def __post_init__(self):
        self.mesh = jax.make_mesh((1,), ("data",))
        self.rng_key = jax.random.key(0)
        self.state = nnx.split(self.model)[1]
        self.refresh_state_leaves()

    def refresh_state_leaves(self) -> None:
        self.state_leaves = tuple(jax.tree.leaves(self.state))


def runners() -> list[Runner]:
    config = SimpleNamespace(model_config=SimpleNamespace())
    return [Runner(NewModel()), Runner(OldModel(config.model_config), config)]


@pytest.mark.parametrize("kind", [0, 1], ids=["loader of tensors", "loader of files"])
def test_new_weights_are_what_the_next_step_takes(kind: int):
    runner = runners()[kind]
    tensor = np.arange(6, dtype=np.float32).reshape(2, 3)
    tpu_weights.replace_weights(runner, iter([("weight", tensor)]))
    np.testing.assert_array_equal(runner.state_leaves[0], tensor.T)
    assert not vars(runner.vllm_config.model_config)


@pytest.mark.parametrize(
    "tensor", [np.zeros((4, 3), np.float32), np.zeros((2, 3), np.int32)], ids=["shape", "dtype"]
)
def test_parameters_of_another_form_are_an_error_and_not_a_compilation(tensor: np.ndarray):
    with raises(RuntimeError, key="weight", value="another form"):
        tpu_weights.replace_weights(Runner(NewModel()), iter([("weight", tensor)]))


def test_a_load_that_fails_leaves_the_runner_with_a_state():
    runner = Runner(NewModel())

    def broken():
        yield "weight", np.ones((2, 3), np.float32)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="gone"):
        tpu_weights.replace_weights(runner, broken())
    assert runner.state_leaves
    assert runner.state_leaves[0].shape == (3, 2)


def test_a_torch_model_says_that_its_weights_stay():
    runner = Runner(NewModel())
    runner.state = {"vllm_model.weight": jnp.zeros(2)}
    assert "MODEL_IMPL_TYPE=auto" in tpu_weights.why_not_replaceable(runner)
    with pytest.raises(RuntimeError, match="torch model"):
        tpu_weights.replace_weights(runner, iter(()))


class Workers:
    """``AsyncLLM`` as far as its workers are asked."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    async def collective_rpc(self, method: str) -> list:
        return [getattr(tpu_weights, method)(self.runner)]


async def test_the_engine_asks_its_workers_before_it_declares_what_it_takes():
    runner = Runner(NewModel())
    assert await tpu_weights.ask_workers(Workers(runner)) is None
    runner.state = {}
    assert "cannot be replaced" in await tpu_weights.ask_workers(Workers(runner))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("model")
    save_hf(folder, TINY, tiny_params())
    return Checkpoint.read(folder)


def update(checkpoint: Checkpoint, **changes) -> WeightUpdate:
    return WeightUpdate(version=1, kind="safetensors", payload=[], **changes)


def test_without_a_probe_nothing_is_taken_whatever_the_settings_say(
    checkpoint: Checkpoint, tmp_path
):
    save_hf(tmp_path, TINY, tiny_params())
    files = [str(file) for file in tmp_path.glob("*.safetensors")]
    updater = WeightUpdater(None, checkpoint, replace(SETTINGS, require_probe=False), "tpu")
    with pytest.raises(WeightUpdateError, match="log-prob probe"):
        updater.check(WeightUpdate(version=1, kind="safetensors", payload=files), served=0)


def test_parts_of_a_model_and_models_that_stay_are_refused(checkpoint: Checkpoint):
    updater = WeightUpdater(None, checkpoint, SETTINGS, "tpu")
    assert updater.kinds == {"safetensors"}
    with pytest.raises(WeightUpdateError, match="whole updates only"):
        updater.check(update(checkpoint, partial=True), served=0)
    fixed = WeightUpdater(None, checkpoint, SETTINGS, "tpu", why_fixed="they stay")
    assert not fixed.kinds
    with pytest.raises(WeightUpdateError, match="they stay"):
        fixed.check(update(checkpoint), served=0)


def test_seeds_and_log_probs_are_asked_for_as_the_plugin_answers():
    sampling = SamplingParams(max_tokens=4, temperature=0.7, seed=3)
    request = GenerateRequest(request_id="r", prompt_ids=(3,), sampling=sampling)
    run = RunningRequest(request, max_tokens=4, eos_ids=frozenset(), seed=0, decode_text=None)
    on_gpu = vllm_sampling(run)
    on_tpu = vllm_sampling(run, tpu=True)
    assert (on_gpu["seed"], on_gpu["logprobs"]) == (3, 0)
    assert (on_tpu["seed"], on_tpu["logprobs"]) == (None, 1)


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"kv_cache_gib": 2.0}, "kv_cache_gib=2.0"),
        ({"sleep": True}, "sleep"),
        ({"adapters": {"a": "x"}}, "serves none"),
        ({"multi_modal": {"image": 1}}, "prompts with images"),
    ],
)
def test_settings_that_mean_nothing_on_tpus_are_refused(setting: dict, named: str):
    check_tpu_settings(SETTINGS)
    with raises(ConfigError, value=named):
        check_tpu_settings(replace(SETTINGS, **setting))
