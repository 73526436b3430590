"""``tpu_pod.sh`` with a made-up Google Cloud: a fake ``gcloud`` on PATH, whose hosts are folders of
this machine.

Its ssh really runs the command, with the host's folder as home. ``gs://`` is a folder, too; where a
host names it, it sees that folder's path. What the cloud does wrong is ordered by files in
``orders/``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jax_agent_rl.deploy.launch.tpu.gcloud import parse_topology
from jax_agent_rl.deploy.launch.tpu.job import Job
from tests.launching import LEARN, ROOT
from tests.ports import free_ports
from tests.simulated import COMPILE_QUICKLY

_GCLOUD = """\
import json, os, pathlib, re, shutil, signal, subprocess, sys, time
folder = pathlib.Path(os.environ["FAKE_CLOUD"])
words = sys.argv[1:]
with (folder / "calls").open("a") as calls:
    calls.write(" ".join(words) + "\\n")
options = dict(word.lstrip("-").partition("=")[::2] for word in words if word.startswith("--"))
names = [word for word in words if not word.startswith("--")]
orders = folder / "orders"

def fail(message, status=1):
    print("ERROR: (gcloud) " + message, file=sys.stderr)
    sys.exit(status)

def ordered(name):
    return (orders / name).read_text() if (orders / name).exists() else None

def node_file(name):
    return folder / "nodes" / (name + ".json")

def read(file):
    if not file.exists():
        fail("NOT_FOUND: Resource was not found")
    return json.loads(file.read_text())

def write(file, content):
    beside = file.with_suffix(".new")
    beside.write_text(json.dumps(content))
    beside.replace(file)

def add_node(name):
    write(node_file(name), {
        "name": name, "acceleratorType": options["accelerator-type"], "state": "READY",
        "zone": options["zone"],
    })

def refuse():
    for name, message in {
        "bad-kind": "INVALID_ARGUMENT: Cloud TPU received an invalid AcceleratorType, "
                    '"v5litepod-4"',
        "no-quota": "RESOURCE_EXHAUSTED: "
                    "Quota limit 'TPUV5sLitepodPerProjectPerZoneForTPUAPI' has been exceeded.",
        "no-capacity": 'code 8: There is no more capacity in the zone "us-west4-a"',
    }.items():
        if ordered(name) is not None:
            fail(message)

def local(place):
    if place.startswith("gs://"):
        return folder / "buckets" / place.removeprefix("gs://")
    return pathlib.Path(place)

def run(node, worker, command):
    if read(node_file(node))["state"] != "READY":
        fail("The TPU is in state PREEMPTED, and cannot be used")
    home = folder / "hosts" / node / str(worker)
    home.mkdir(parents=True, exist_ok=True)
    slurm = {
        "SLURM_JOB_ID": ordered("job") or "1", "SLURM_STEP_NODELIST": "localhost",
        "SLURM_LOCALID": "0", "SLURM_NTASKS": ordered("hosts") or "1", "SLURM_PROCID": str(worker),
    }
    child = subprocess.Popen(
        ["bash", "-c", command.replace("gs://", str(folder / "buckets") + "/")], cwd=home,
        env=os.environ | slurm | {"HOME": str(home), "FAKE_HOST": node + "/" + str(worker)},
        start_new_session=True,
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    try:
        while child.poll() is None:
            cut = ordered("offline") is not None or (orders / ("cut-" + str(worker))).exists()
            if cut or read(node_file(node))["state"] != "READY":
                (orders / ("cut-" + str(worker))).unlink(missing_ok=True)
                sys.exit(255)
            time.sleep(0.05)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
    sys.exit(child.returncode)

if ordered("offline") is not None and names[0] == "compute":
    fail("There was a problem refreshing your current auth tokens: HTTPSConnectionPool("
         "host='oauth2.googleapis.com', port=443): Max retries exceeded with url: /token "
         "(Network is unreachable) Please run: $ gcloud auth login")
if ordered("no-login") is not None and names[0] == "compute":
    fail("You do not currently have an active account selected. Please run: $ gcloud auth login")
if ordered("no-project") is not None and names[0] == "compute" and "project" not in options:
    fail("The required property [project] is not currently set.")
if ordered("no-zone") is not None and names[0] == "compute":
    place = "locations/" + options["zone"]
    fail("PERMISSION_DENIED: Permission denied on '" + place + "' (or it may not exist).")
if ordered("describe-fails") is not None and "describe" in names:
    fail("INTERNAL: an internal error has occurred")
match names:
    case [_, _, "tpu-vm", "describe", name]:
        print(json.dumps(read(node_file(name))))
    case [_, _, "tpu-vm", "create", name]:
        refuse()
        if ordered("create-fails") is not None:
            fail("INTERNAL: an internal error has occurred")
        if node_file(name).exists():
            fail("ALREADY_EXISTS")
        add_node(name)
    case [_, _, "tpu-vm", "delete", name]:
        if ordered("delete-fails") == name:
            fail("INTERNAL: an internal error has occurred")
        read(node_file(name))
        node_file(name).unlink()
        shutil.rmtree(folder / "hosts" / name, ignore_errors=True)
    case [_, _, "tpu-vm", "ssh", name]:
        run(name, int(options["worker"]), options["command"])
    case [_, _, "tpu-vm", "scp", source, target]:
        if deaf := int(ordered("deaf") or 0):
            (orders / "deaf").write_text(str(deaf - 1))
            fail("ssh: connect to host 127.0.0.1 port 22: Connection refused")
        node, _, path = target.partition(":")
        home = folder / "hosts" / node / options["worker"]
        home.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, home / path)
    case ["storage", "ls", place]:
        sys.exit(0 if local(place).exists() else 1)
    case ["storage", "rsync", source, target]:
        left_out = re.compile(options.get("exclude", "$^"))
        shutil.copytree(local(source), local(target), dirs_exist_ok=True,
                        ignore=lambda _, names: [name for name in names if left_out.search(name)])
    case ["storage", "cp", source, target]:
        local(target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(local(source), local(target))
    case _:
        fail("unknown command: " + " ".join(words))
"""

# The real Python, but for the run itself, which notes its arguments and does as it is told.
_PYTHON = """\
#!/usr/bin/env bash
if [ "$2" = jax_agent_rl.cli ]; then exec {python} -SE "$FAKE_CLOUD/trainer.py" "${{@:3}}"; fi
exec {python} -S "$@"
"""

_TRAINER = (
    LEARN
    + """\
import json, os, pathlib
folder = pathlib.Path(os.environ["FAKE_CLOUD"])
print("arguments:", *sys.argv[1:], flush=True)
(folder / ("environment-" + sys.argv[1])).write_text(json.dumps(dict(os.environ)))
with (folder / "runs").open("a") as runs:
    runs.write(os.environ["FAKE_HOST"] + " " + " ".join(sys.argv[1:]) + "\\n")
learn((folder / "orders" / "trainer").read_text().split())
"""
)


@dataclass
class Cloud:
    """A folder that holds the cloud.

    Attributes:
        folder: ``tmp_path``.
        variables: more environment variables for launcher and hosts.
    """

    folder: Path
    variables: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("nodes", "orders", "buckets"):
            (self.folder / name).mkdir(parents=True)
        self.write("path/gcloud", f"#!{sys.executable} -SE\n{_GCLOUD}").chmod(0o755)
        self.write("venv/bin/python", _PYTHON.format(python=sys.executable)).chmod(0o755)
        self.write("trainer.py", _TRAINER)
        self.order("trainer", "ends 0")

    def write(self, name: str, text: str) -> Path:
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def order(self, name: str, text: str = "") -> None:
        """What the cloud, or the made-up trainer, does from now on."""
        self.write(f"orders/{name}", text)

    def recall(self, name: str) -> None:
        """Takes an order back."""
        (self.folder / "orders" / name).unlink()

    def use_real_trainer(self) -> None:
        """Hosts run jax, each as a process with one device; they find each other as they would
        under Slurm.
        """
        self.write("venv/bin/python", f'#!/usr/bin/env bash\nexec {sys.executable} "$@"\n')
        # jax takes the port from the job's number: 61440 + number modulo 4096.
        self.order("job", str(free_ports(1, first=61440, last=65535) - 61440))
        self.variables |= {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count=1 {COMPILE_QUICKLY}",
        }

    @property
    def environment(self) -> dict[str, str]:
        variables = {
            "PATH": f"{self.folder / 'path'}:{os.environ['PATH']}",
            "JAX_AGENT_RL_VENV": str(self.folder / "venv"),
            "PYTHON": sys.executable,
            "FAKE_CLOUD": str(self.folder),
        }
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return inherited | variables | self.variables

    def command(self, *arguments: object) -> list[str]:
        """tpu_pod.sh with a slice of one host, looked at often; later arguments win."""
        options = [
            "--name",
            "try",
            "--zone",
            "us-west4-a",
            "--topology",
            "v5e:2x2",
            "--poll",
            "1",
            "--no-install",
        ]
        options += ["--logs-dir", str(self.folder / "logs")]
        options += (
            [] if (self.folder / "orders" / "no-project").exists() else ["--project", "my-project"]
        )
        return [str(ROOT / "launch" / "tpu_pod.sh"), *options, *map(str, arguments)]

    def launch(self, *arguments: object, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Runs tpu_pod.sh to its end."""
        return subprocess.run(
            self.command(*arguments),
            capture_output=True,
            text=True,
            env=self.environment,
            timeout=timeout,
        )

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        """Starts tpu_pod.sh; both outputs are one pipe."""
        pipe = subprocess.PIPE
        return subprocess.Popen(
            self.command(*arguments),
            stdout=pipe,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environment,
        )

    def calls(self, *words: str) -> list[str]:
        """Calls of gcloud that contain these words, one after the other."""
        file = self.folder / "calls"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line for line in lines if " ".join(words) in line]

    def runs(self) -> list[str]:
        """Host and arguments of every run that the made-up trainer began."""
        file = self.folder / "runs"
        return sorted(file.read_text().splitlines()) if file.exists() else []

    def environment_of(self, program: str) -> dict[str, str]:
        """Variables of the last ``train`` that began."""
        return json.loads((self.folder / f"environment-{program}").read_text())

    def node(self, name: str = "try") -> dict[str, Any] | None:
        """A slice as gcloud describes it; None if there is none."""
        file = self.folder / "nodes" / f"{name}.json"
        return json.loads(file.read_text()) if file.exists() else None

    def preempt(self, name: str = "try") -> None:
        """Takes a slice back: its hosts' processes are gone at once, its state says so."""
        self.set_state("PREEMPTED", name)
        self.power_off(name)

    def set_state(self, state: str, name: str = "try") -> None:
        file = self.folder / "nodes" / f"{name}.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"state": state}))

    def power_off(self, name: str = "try") -> None:
        """Kills what runs on a slice's hosts."""
        for ids in (self.folder / "hosts" / name).glob("*/jax_agent_rl-runs/*/process"):
            for pid in ids.read_text().split():
                try:
                    os.killpg(int(pid), signal.SIGKILL)
                except ProcessLookupError:
                    continue

    def close(self) -> None:
        """Leaves no process of a test behind."""
        for name in (self.folder / "hosts").glob("*"):
            self.power_off(name.name)


def job_of(topology: str = "v5e:4x4", **changed: object) -> Job:
    """The user's own configuration on an on-demand slice, kept in a bucket, but for what is
    changed.
    """
    chosen = parse_topology(topology)
    fields = {
        "config": Path("/home/me/my.yaml"),
        "overrides": ("seed=1",),
        "bucket": "gs://b",
        "prepare": None,
    }
    defaults = {"name": "my-run", "topology": chosen, "runtime": chosen.kind.runtime}
    return Job(**(defaults | fields | changed))  # type: ignore[arg-type]
