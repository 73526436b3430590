"""The conformance suite on every backend of the package."""

import importlib.util
import json
import shutil
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jax_agent_rl.errors import ConfigError
from jax_agent_rl.jetstream import speculation
from jax_agent_rl.jetstream.speculation import Speculation
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.hf import save_hf
from jax_agent_rl.testing.conformance.backends import (
    ADAPTED,
    BASE,
    MIXED,
    OTHER,
    BackendOptions,
    select_backend,
)
from jax_agent_rl.testing.conformance.models import (
    ModelDirs,
    TransformersReference,
    log_softmax,
    prepare_folders,
    write_tiny_model,
)
from jax_agent_rl.testing.conformance.runner import SUITE, BackendSession, run_suite
from tests.gpu_backend.vision import write_model
from tests.simulated import environment_with
from tests.tiny import GEMMA4_EXPERTS, GEMMA4_SMALL, tiny_params
from tests.toy_backend import ToyBackend, served_toy, toy_files, toy_subject
from tests.warm import python

# The last test of control closes the backend.
# isort: off
from jax_agent_rl.testing.conformance.suite.test_outputs import *  # noqa: F403
from jax_agent_rl.testing.conformance.suite.test_batching import *  # noqa: F403
from jax_agent_rl.testing.conformance.suite.test_replay import *  # noqa: F403
from jax_agent_rl.testing.conformance.suite.test_weights import *  # noqa: F403
from jax_agent_rl.testing.conformance.suite.test_control import *  # noqa: F403

# isort: on


@pytest.fixture(scope="session")
def options(tmp_path_factory) -> BackendOptions:
    return BackendOptions(folders=prepare_folders(None, Path(tmp_path_factory.mktemp("models"))))


def toy(request):
    return toy_subject(ToyBackend)


def jetstream(request):
    pytest.importorskip("torch")
    return select_backend("jetstream", request.getfixturevalue("options"))


def external_engine(request):
    pytest.importorskip("torch")
    options = replace(
        request.getfixturevalue("options"),
        engine_factory="tests.later_api:make_external_engine",
        max_concurrent=4,
    )
    return select_backend("jetstream", options)


def jetstream_int8(request):
    """The matrices are such that int8 holds them exactly: any change of a log-prob is a mistake."""
    pytest.importorskip("torch")
    options = request.getfixturevalue("options")
    scratch = request.getfixturevalue("tmp_path_factory").mktemp("int8")
    sets = options.folders
    int8_folders = ModelDirs(base=scratch / "base", scratch=scratch)
    for which in (BASE, OTHER):
        rounded(sets.weights(which), int8_folders.weights(which))
    for which in (MIXED, ADAPTED):
        shutil.copytree(sets.weights(which), int8_folders.weights(which))
    return select_backend("jetstream", replace(options, folders=int8_folders, quantize="int8"))


EIGHT_BITS = 0.3
"""What 8 bits of keys and values may make of this random model's log-probs, in nats."""


def jetstream_int8_cache(request):
    pytest.importorskip("torch")
    options = request.getfixturevalue("options")
    return select_backend("jetstream", replace(options, kv_dtype="int8", tolerance=EIGHT_BITS))


def jetstream_speculative(request):
    """The engine verifies every draft, whether it pays or not."""
    pytest.importorskip("torch")
    patch = pytest.MonkeyPatch()
    request.addfinalizer(patch.undo)
    patch.setattr(speculation, "LOSS_SECONDS", float("inf"))
    patch.setattr(
        Speculation,
        "best_columns",
        lambda on, plain, chances: on.most_columns if len(chances) else None,
    )
    options = request.getfixturevalue("options")
    return select_backend("jetstream", replace(options, num_speculative_tokens=4))


def rounded(model: Path, folder: Path) -> Path:
    """A copy of a model in which each row of a layer's matrix is a multiple of the row's 127th."""
    shutil.copytree(model, folder)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name in [
            name for name in tensors if ".layers." in name and name.endswith("_proj.weight")
        ]:
            step = np.abs(tensors[name]).max(-1, keepdims=True) / 127
            tensors[name] = (np.round(tensors[name] / step) * step).astype(tensors[name].dtype)
        save_file(tensors, file, metadata={"format": "pt"})
    return folder


def vllm(request):
    pytest.importorskip("torch")
    pytest.importorskip("vllm")  # the real one: its wheels are not installed everywhere
    try:
        return select_backend("vllm", request.getfixturevalue("options"))
    except ConfigError as error:
        pytest.skip(str(error))


def sglang(request):
    pytest.importorskip("torch")
    try:
        return select_backend("sglang", request.getfixturevalue("options"))
    except ConfigError as error:
        pytest.skip(str(error))


def remote_toy(request):
    folder = request.getfixturevalue("tmp_path_factory").mktemp("weights")
    return toy_subject(served_toy, payload=toy_files(folder))


def remote_toy_upload(request):
    folder = request.getfixturevalue("tmp_path_factory").mktemp("weights")
    return toy_subject(lambda: served_toy(shares_disk=False), payload=toy_files(folder))


def remote_jetstream(request):
    pytest.importorskip("torch")
    return select_backend("remote", request.getfixturevalue("options"))


def remote_vllm(request):
    vllm(request)
    return select_backend("remote", replace(request.getfixturevalue("options"), engine="vllm"))


def ray_jetstream(request):
    pytest.importorskip("torch")
    if (
        importlib.util.find_spec("ray") is None
    ):  # importing it here would be before what it reads then is set
        pytest.skip("Ray is not installed")
    return select_backend("ray", request.getfixturevalue("options"))


def ray_vllm(request):
    vllm(request)
    ray_jetstream(request)
    return select_backend("ray", replace(request.getfixturevalue("options"), engine="vllm"))


EMBEDDED = [jetstream, jetstream_speculative, jetstream_int8, jetstream_int8_cache, external_engine]
SUBJECTS = [toy, *EMBEDDED, remote_toy, remote_toy_upload, remote_jetstream, ray_jetstream]
ON_VLLM = [
    pytest.param(subject, marks=pytest.mark.vllm) for subject in (vllm, remote_vllm, ray_vllm)
]


ON_SGLANG = [pytest.param(sglang, marks=pytest.mark.sglang)]


@pytest.fixture(
    scope="session", params=[*SUBJECTS, *ON_VLLM, *ON_SGLANG], ids=lambda subject: subject.__name__
)
def backend_session(request):
    with BackendSession(request.param(request)) as session:
        yield session


def test_data_parallel_engines_obey_the_protocol_as_one(tmp_path: Path):
    pytest.importorskip("torch")
    command = [
        *python(),
        "-m",
        "jax_agent_rl.cli",
        "conformance",
        "--backend",
        "jetstream",
        "--data-parallel",
        "3",
    ]
    process = subprocess.run(
        [*command, "--json"],
        capture_output=True,
        text=True,
        timeout=580,
        env=environment_with(3),
        cwd=Path.cwd(),
    )
    assert process.stdout.strip(), process.stderr[-2000:]
    results = json.loads(process.stdout.splitlines()[-1])["results"]
    assert not [result for result in results if result["outcome"] not in ("passed", "skipped")], (
        process.stderr[-2000:]
    )
    assert process.returncode == 0
    assert Counter(result["outcome"] for result in results)["passed"] > 30


def test_every_file_of_the_suite_runs_here():
    modules = {
        value.__module__ for name, value in globals().items() if name.startswith("test_")
    } - {__name__}
    assert {name.rpartition(".")[2] for name in modules} == {
        file.stem for file in SUITE.glob("test_*.py")
    }


def test_what_a_rounded_cache_may_change_is_far_below_what_other_weights_do(
    options: BackendOptions,
):
    pytest.importorskip("torch")
    reference = TransformersReference(
        {which: options.folders.weights(which) for which in (BASE, OTHER)}
    )
    for ids in np.random.default_rng(0).integers(3, 97, (6, 24)).tolist():
        ours = log_softmax(reference.logits(ids, weights=BASE))
        other_weights = log_softmax(reference.logits(ids, weights=OTHER))
        likely = ours.argmax(-1)[:, None]
        assert np.abs(np.take_along_axis(ours - other_weights, likely, -1)).max() > 10 * EIGHT_BITS


@pytest.mark.parametrize("backend", ["jetstream", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_engines_serve_adapters(backend: str, options: BackendOptions):
    """The checks of adapters and a few that an engine with adapters could fail."""
    pytest.importorskip("torch")
    if backend == "vllm":
        pytest.importorskip("vllm")
    checks = [
        "adapters",
        "adapters-and-prefixes",
        "greedy-logprobs",
        "prefix-reuse",
        "weights-take-effect",
    ]
    subject = select_backend(backend, replace(options, adapters=True, max_concurrent=2))
    report = run_suite(subject, only=checks)
    assert [r.outcome for r in report.results] == ["passed"] * 5, report.results


@pytest.mark.parametrize("backend", ["jetstream", "remote"])
def test_engines_report_experts(backend: str, tmp_path: Path):
    """The checks of experts and a few that a mixture could fail, on a tiny random Qwen3 MoE."""
    pytest.importorskip("torch")
    model = write_tiny_model(tmp_path / "model", experts=True)
    options = BackendOptions(folders=prepare_folders(model, tmp_path), max_concurrent=2)
    checks = [
        "experts-match-reference",
        "experts-of-a-next-turn",
        "experts-survive-an-abort",
        "experts-of-new-weights",
    ]
    checks += ["greedy-matches-reference", "prefix-reuse"]
    report = run_suite(select_backend(backend, options), only=checks)
    assert [r.outcome for r in report.results] == ["passed"] * 6, report.results


def write_gemma4(folder: Path, config: DecoderConfig) -> Path:
    """Write a random Gemma 4 with the suite's tokenizer."""
    letters = write_tiny_model(folder / "letters")
    config = replace(config, max_position_embeddings=1024)
    model = folder / "model"
    save_hf(model, config, tiny_params(config=config), tokenizer_from=letters)
    return model


def test_engines_serve_layers_that_share_keys(tmp_path: Path):
    """Checks that heads of two sizes and shared caches could fail, on a tiny random Gemma 4."""
    pytest.importorskip("torch")
    model = write_gemma4(tmp_path, GEMMA4_SMALL)
    options = BackendOptions(folders=prepare_folders(model, tmp_path), max_concurrent=2)
    checks = ["greedy-matches-reference", "prefix-reuse", "weights-take-effect"]
    report = run_suite(select_backend("jetstream", options), only=checks)
    assert [r.outcome for r in report.results] == ["passed"] * 3, report.results


def recurrent(folder: Path) -> Path:
    """Qwen3.5: a delta net, then gated attention."""
    return write_tiny_model(folder / "model", delta_nets=True)


def latent(folder: Path) -> Path:
    """DeepSeek-V3: latent attention and experts in groups."""
    return write_tiny_model(folder / "model", latents=True)


def sharing(folder: Path) -> Path:
    """Gemma 4 E2B: windows, heads of two sizes, and layers that share keys and values."""
    return write_gemma4(folder, GEMMA4_SMALL)


def beside_dense(folder: Path) -> Path:
    """Gemma 4 26B-A4B: windows, keys as values, and experts beside dense networks."""
    return write_gemma4(folder, GEMMA4_EXPERTS)


@pytest.mark.parametrize(
    "write", [recurrent, latent, sharing, beside_dense], ids=lambda write: write.__name__
)
def test_an_engine_of_other_layers_does_all_that_one_of_attention_does(write, tmp_path: Path):
    """The whole suite on a tiny random model, with drafts and an adapter."""
    pytest.importorskip("torch")
    options = BackendOptions(
        folders=prepare_folders(write(tmp_path), tmp_path),
        max_concurrent=2,
        num_speculative_tokens=3,
        adapters=True,
    )
    report = run_suite(select_backend("jetstream", options))
    failed = [result for result in report.results if result.outcome not in ("passed", "skipped")]
    assert not failed
    passed = {result.check for result in report.results if result.outcome == "passed"}
    assert passed >= {"greedy-matches-reference", "prefix-reuse", "weights-take-effect"}
    assert passed >= {"adapters", "adapters-and-prefixes", "sleep-and-wake", "replay-supports"}
    assert ("experts-match-reference" in passed) == (write in (latent, beside_dense))


def test_engines_serve_latents(tmp_path: Path):
    """Checks that a cache of latents could fail, on a tiny random DeepSeek-V3."""
    pytest.importorskip("torch")
    model = write_tiny_model(tmp_path / "model", latents=True)
    options = BackendOptions(folders=prepare_folders(model, tmp_path), max_concurrent=2)
    checks = ["greedy-matches-reference", "scores-match-reference", "prefix-reuse"]
    checks += ["experts-match-reference", "experts-of-new-weights", "weights-take-effect"]
    report = run_suite(select_backend("jetstream", options), only=checks)
    assert [r.outcome for r in report.results] == ["passed"] * 6, report.results


@pytest.mark.parametrize("backend", ["jetstream", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_engines_see_images(backend: str, tmp_path: Path):
    """The checks of images and a few that a model with a tower could fail, on a tiny random
    Qwen2.5-VL.
    """
    pytest.importorskip("torch")
    if backend == "vllm":
        pytest.importorskip("vllm")
        pytest.importorskip("torchvision")
    options = BackendOptions(
        folders=prepare_folders(write_model(tmp_path / "model", 0), tmp_path), max_concurrent=2
    )
    checks = ["images-condition-output", "images-and-prefixes", "images-miscounted-refused"]
    checks += ["greedy-matches-reference", "prefix-reuse", "weights-take-effect"]
    report = run_suite(select_backend(backend, options), only=checks)
    assert [r.outcome for r in report.results] == ["passed"] * 6, report.results
