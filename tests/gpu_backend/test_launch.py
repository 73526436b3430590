"""``gpu.sh --device cpu``: a real vLLM engine in a Ray actor and a real learner, started and ended
by the script.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "launch" / "gpu.sh"


def test_the_script_trains_with_a_vllm_engine_and_ends_it(recipe: Path, tmp_path: Path):
    command = [SCRIPT, "--device", "cpu", "--no-install", "--config", recipe]
    command += ["trainer.steps=2", "rollout.vllm.kv_cache_gib=0.125"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"JAX_AGENT_RL_VENV": sys.prefix}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400)
    assert result.returncode == 0, result.stdout + result.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["trained"] == summary["started"] == 8
    assert summary["token_drift"] == 0
    assert summary["max_logprob_gap"] < 1e-3
    assert (tmp_path / "run" / "ray-0" / "vllm.log").is_file()
