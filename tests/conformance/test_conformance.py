"""The conformance suite on every backend of the package: one run each, one test per check."""

import asyncio
import importlib.util
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jax_agent_rl.errors import ConfigError
from jax_agent_rl.testing.conformance import CHECKS, Report, run_suite
from jax_agent_rl.testing.conformance.backend_under_test import BASE, OTHER
from jax_agent_rl.testing.conformance.models import prepare_folders
from jax_agent_rl.testing.conformance.reference import TransformersReference, log_softmax
from jax_agent_rl.testing.conformance.subjects import SubjectOptions, make_subject
from tests.gpu_backend.vision import write_model
from tests.toy_backend import ToyBackend, served_toy, toy_files, toy_subject


@pytest.fixture(scope="session")
def options(tmp_path_factory) -> SubjectOptions:
    return SubjectOptions(folders=prepare_folders(None, Path(tmp_path_factory.mktemp("models"))))


def toy(request):
    return toy_subject(ToyBackend)


def jetstream(request):
    pytest.importorskip("torch")
    return make_subject("jetstream", request.getfixturevalue("options"))


def external_engine(request):
    pytest.importorskip("torch")
    options = replace(
        request.getfixturevalue("options"), external_engine="tests.later_api:make_external_engine", max_concurrent=4
    )
    return make_subject("jetstream", options)


def jetstream_int8(request):
    """Of a model whose matrices int8 holds exactly: whatever else changes a log-prob is a mistake."""
    pytest.importorskip("torch")
    options, scratch = request.getfixturevalue("options"), request.getfixturevalue("tmp_path_factory").mktemp("int8")
    own = {name: rounded(getattr(options.folders, name), scratch / name) for name in ("base", "other")}
    return make_subject("jetstream", replace(options, folders=replace(options.folders, **own), quantize="int8"))


EIGHT_BITS = 0.3
"""What 8 bits of keys and values may make of this random model's log-probs, in nats."""


def jetstream_int8_cache(request):
    pytest.importorskip("torch")
    options = request.getfixturevalue("options")
    return make_subject("jetstream", replace(options, kv_dtype="int8", tolerance=EIGHT_BITS))


def rounded(model: Path, folder: Path) -> Path:
    """A copy of a model in which each row of a layer's matrix is a multiple of the row's 127th."""
    shutil.copytree(model, folder)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name in [name for name in tensors if ".layers." in name and name.endswith("_proj.weight")]:
            step = np.abs(tensors[name]).max(-1, keepdims=True) / 127
            tensors[name] = (np.round(tensors[name] / step) * step).astype(tensors[name].dtype)
        save_file(tensors, file, metadata={"format": "pt"})
    return folder


def vllm(request):
    pytest.importorskip("torch")
    pytest.importorskip("vllm")  # the real one: its wheels are not installed everywhere
    try:
        return make_subject("vllm", request.getfixturevalue("options"))
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
    return make_subject("remote", request.getfixturevalue("options"))


def remote_vllm(request):
    vllm(request)
    return make_subject("remote", replace(request.getfixturevalue("options"), engine="vllm"))


def ray_jetstream(request):
    pytest.importorskip("torch")
    if importlib.util.find_spec("ray") is None:  # importing it here would be before what it reads then is set
        pytest.skip("Ray is not installed")
    return make_subject("ray", request.getfixturevalue("options"))


def ray_vllm(request):
    vllm(request)
    ray_jetstream(request)
    return make_subject("ray", replace(request.getfixturevalue("options"), engine="vllm"))


EMBEDDED = [jetstream, jetstream_int8, jetstream_int8_cache, external_engine]
SUBJECTS = [toy, *EMBEDDED, remote_toy, remote_toy_upload, remote_jetstream, ray_jetstream]
ON_VLLM = [pytest.param(subject, marks=pytest.mark.vllm) for subject in (vllm, remote_vllm, ray_vllm)]


@pytest.fixture(scope="module", params=[*SUBJECTS, *ON_VLLM], ids=lambda subject: subject.__name__)
def report(request) -> Report:
    return asyncio.run(run_suite(request.param(request)))


@pytest.mark.parametrize("check", CHECKS)
def test_it(report: Report, check: str):
    (result,) = [r for r in report.results if r.check == check]
    if result.outcome == "skipped":
        pytest.skip(result.detail)
    assert result.outcome == "passed", result.detail


def test_what_a_rounded_cache_may_change_is_far_below_what_other_weights_do(options: SubjectOptions):
    pytest.importorskip("torch")
    reference = TransformersReference({BASE: options.folders.base, OTHER: options.folders.other})
    for ids in np.random.default_rng(0).integers(3, 97, (6, 24)).tolist():
        ours, others = (log_softmax(reference.logits(ids, weights=which)) for which in (BASE, OTHER))
        likely = ours.argmax(-1)[:, None]
        assert np.abs(np.take_along_axis(ours - others, likely, -1)).max() > 10 * EIGHT_BITS


@pytest.mark.parametrize("backend", ["jetstream", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_engines_serve_adapters(backend: str, options: SubjectOptions):
    """The checks of adapters and a few that an engine with adapters could fail."""
    pytest.importorskip("torch")
    if backend == "vllm":
        pytest.importorskip("vllm")
    checks = ["adapters", "adapters-and-prefixes", "greedy-logprobs", "prefix-reuse", "weights-take-effect"]
    subject = make_subject(backend, replace(options, adapters=True, max_concurrent=2))
    report = asyncio.run(run_suite(subject, only=checks))
    assert [r.outcome for r in report.results] == ["passed"] * 5, report.results


@pytest.mark.parametrize("backend", ["jetstream", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_engines_see_images(backend: str, tmp_path: Path):
    """The checks of images and a few that a model with a tower could fail, on a tiny random Qwen2.5-VL."""
    pytest.importorskip("torch")
    if backend == "vllm":
        pytest.importorskip("vllm")
        pytest.importorskip("torchvision")
    options = SubjectOptions(folders=prepare_folders(write_model(tmp_path / "model", 0), tmp_path), max_concurrent=2)
    images = [name for name in CHECKS if name.startswith("images-")]
    checks = [*images, "greedy-matches-reference", "prefix-reuse", "weights-take-effect"]
    report = asyncio.run(run_suite(make_subject(backend, options), only=checks))
    assert len(images) == 3 and [r.outcome for r in report.results] == ["passed"] * 6, report.results
