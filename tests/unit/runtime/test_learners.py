"""A learner on a mesh reads its model in parts: no device and no host ever holds all of it."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

from jax_agent_rl.config import build
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.models.config import Experts
from jax_agent_rl.models.hf import load_config, save_hf
from jax_agent_rl.runtime.build import make_learner
from tests.messages import raises
from tests.ports import free_port
from tests.simulated import environment_with
from tests.tiny import TINY, tiny_params
from tests.warm import python

MODEL = replace(
    TINY,
    vocab_size=512,
    num_layers=2,
    qk_norm=True,
    family="qwen3_moe",
    experts=Experts(count=4, per_token=2, intermediate_size=16, normalize=True),
)
ALGORITHM = {
    "adv_estimator": "gae",
    "kl": {"where": "loss"},
}  # a critic and a reference policy, too

SCRIPT = """
import json, sys, jax
from jax_agent_rl.config import build
from jax_agent_rl.models import hf, tensors
from jax_agent_rl.runtime.build import make_learner
from jax_agent_rl.runtime.multihost import initialize

def held():
    "Bytes on this process's devices, the fullest one's."
    held = dict.fromkeys(jax.local_devices(), 0)
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return max(held.values())

class Counted:
    "An open safetensors file, or a tensor of it, that counts what is read."
    read, largest, peak = 0, 0, 0

    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def get_slice(self, name):
        return Counted(self._inner.get_slice(name))

    def __getitem__(self, index):
        part = self._inner[index]
        Counted.read += part.nbytes
        Counted.largest = max(Counted.largest, part.nbytes)
        Counted.peak = max(Counted.peak, held())
        return part

own = tensors.safe_open
tensors.safe_open = lambda *arguments, **keywords: Counted(own(*arguments, **keywords))
config = build(json.loads(sys.argv[1]), sys.argv[2:])
initialize(config.learner.multihost)
learner = make_learner(config, hf.load_config(config.model.path))
print(json.dumps([Counted.read, Counted.largest, max(Counted.peak, held())]))
"""


def tree(folder: Path, model=MODEL) -> dict:
    """A configuration whose policy and critic are read from two folders."""
    for name in ("policy", "critic"):
        save_hf(folder / name, model, tiny_params(config=model))
    return {
        "run_dir": str(folder / "run"),
        "model": {"path": str(folder / "policy")},
        "data": {"train": "none.jsonl"},
        "algorithm": ALGORITHM,
        "critic": {"path": str(folder / "critic")},
    }


def loads(config: dict, mesh: dict, *, processes: int = 1) -> list[tuple[int, int, int]]:
    """Return, by process: bytes read, all and of the largest piece, and the most a device held."""
    devices = 4 if mesh else 1
    environment = environment_with(devices // processes)
    port = free_port()
    config = config | {"learner": {"mesh": mesh}}
    several = [
        f"learner.multihost.coordinator=127.0.0.1:{port}",
        f"learner.multihost.num_processes={processes}",
    ]
    command = [*python(), "-c", SCRIPT, json.dumps(config), *(several if processes > 1 else [])]
    number = ["learner.multihost.process_id={}"] if processes > 1 else []
    started = [
        subprocess.Popen(
            [*command, *(setting.format(index) for setting in number)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(processes)
    ]
    try:
        outputs = [process.communicate(timeout=280) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * processes, "\n".join(
        err[-3000:] for _, err in outputs
    )
    return [tuple(json.loads(out.splitlines()[-1])) for out, _ in outputs]


def test_no_device_and_no_host_ever_holds_a_whole_model(tmp_path: Path):
    config = tree(tmp_path)
    ((everything, embedding, held),) = loads(config, {})
    ((read, largest, each),) = loads(config, {"fsdp": 2, "tensor": 2})
    # A quarter each, and norms, which all have.
    assert read < 1.05 * everything and largest == embedding / 4 and each < 0.27 * held, (
        read,
        largest,
        each,
        held,
    )
    for read, largest, each in loads(config, {"fsdp": 2, "expert": 2}, processes=2):
        assert read < 0.55 * everything and largest == embedding / 2 and each < 0.6 * held, (
            read,
            largest,
            each,
            held,
        )


def test_a_critic_of_another_architecture_is_refused_before_it_is_read(tmp_path: Path):
    config = build(tree(tmp_path))
    save_hf(
        tmp_path / "critic",
        replace(MODEL, num_layers=1),
        tiny_params(config=replace(MODEL, num_layers=1)),
    )
    (tmp_path / "critic" / "model.safetensors").unlink()
    with raises(ConfigError, key="critic.path", value="other shapes"):
        make_learner(config, load_config(config.model.path))
