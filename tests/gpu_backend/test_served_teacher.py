"""On-policy distillation from a teacher behind ``vllm serve``: its scores are those of the same one
in transformers.
"""

import contextlib
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jax_agent_rl.config import TeacherConfig
from jax_agent_rl.models.hf import save_hf
from jax_agent_rl.observe.run_dir import read_records
from jax_agent_rl.runtime.served_teachers import CompletionsTeacher
from jax_agent_rl.testing.conformance.models import log_softmax
from tests.gpu_backend.conftest import MAX_MODEL_LEN, SMALL, TOKENIZER, Reference
from tests.ports import free_port
from tests.tiny import tiny_params

IDS = np.random.default_rng(3).integers(3, 49152, 40).tolist()


@pytest.fixture
def teacher(recipe: Path, tmp_path: Path) -> Path:
    """Another random model with the student's tokenizer."""
    folder = tmp_path / "teacher"
    model = replace(SMALL, vocab_size=49152, eos_token_ids=())
    save_hf(folder, model, tiny_params(1, model), tokenizer_from=TOKENIZER)
    return folder


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """vLLM's server in a process of its own; yields its address."""
    port = free_port()
    settings = [
        "--dtype=float32",
        "--enforce-eager",
        f"--max-model-len={MAX_MODEL_LEN * 2}",
        "--max-num-seqs=8",
        f"--port={port}",
    ]
    settings += [f"--model={folder}", "--host=127.0.0.1"]
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        *settings,
    ]  # the CPU build has no `vllm`
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"},
        )
    try:
        while True:  # until pytest's timeout
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health")
                break
            assert server.poll() is None, (folder / "server.log").read_text()[-3000:]
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait(60)


async def test_its_scores_are_those_of_the_same_teacher_elsewhere(
    recipe: Path, teacher: Path, tmp_path: Path
):
    with serving(teacher) as url:
        client = CompletionsTeacher(TeacherConfig(path=str(teacher), url=url))
        scores = await client.score(IDS, start=5, top_k=6)
        await client.close()
        for name, teachers in (
            ("here", str(teacher)),
            ("there", f"[{{path: {teacher}, url: '{url}'}}]"),
        ):
            settings = [
                f"distill.teachers={teachers}",
                "algorithm={kl: {top_k: 6}}",
                f"run_dir={tmp_path / name}",
            ]
            command = [
                sys.executable,
                "-m",
                "jax_agent_rl.cli",
                "distill",
                str(recipe),
                "trainer.steps=2",
                *settings,
            ]
            process = subprocess.run(command, capture_output=True, text=True)
            assert process.returncode == 0, process.stderr
    logs = log_softmax(Reference(teacher).logits(IDS))[4:-1]
    np.testing.assert_allclose(scores.log_probs, logs[np.arange(len(logs)), IDS[5:]], atol=1e-4)
    np.testing.assert_array_equal(scores.top_ids, np.argsort(-logs)[:, :6])
    np.testing.assert_allclose(scores.top_log_probs, -np.sort(-logs)[:, :6], atol=1e-4)
    losses: dict[str, list[float]] = {"here": [], "there": []}
    for name, step_losses in losses.items():
        for record in read_records(tmp_path / name / "metrics.jsonl"):
            if record["kind"] == "step":
                step_losses.append(record["kl_loss"])
    assert losses["here"][0] > 0.001
    assert losses["there"] == pytest.approx(losses["here"], rel=1e-3)
