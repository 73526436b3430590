"""``gpu.sh --device cpu``: a real vLLM server and a real learner, started and ended by the script."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.ports import free_port, is_free

SCRIPT = Path(__file__).parents[2] / "launch" / "gpu.sh"


def test_the_script_trains_through_a_vllm_server_and_ends_it(recipe: Path, tmp_path: Path):
    port = free_port()
    command = [SCRIPT, "--device", "cpu", "--no-install", "--config", recipe, "--port", str(port)]
    command += ["trainer.steps=2", "rollout.vllm.kv_cache_gib=0.125"]
    environment = os.environ | {"JAX_AGENT_RL_VENV": sys.prefix, "PYTHON": sys.executable}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400)
    assert result.returncode == 0, result.stdout + result.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["trained"] == summary["started"] == 8 and summary["token_drift"] == 0
    assert summary["max_logprob_gap"] < 1e-3
    assert f"server-0 is healthy at http://127.0.0.1:{port}" in result.stdout
    assert (tmp_path / "run.servers" / "server-0" / "vllm.log").is_file()
    assert "[server-0] stopping" in result.stdout and is_free(port)
