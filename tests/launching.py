"""``gpu.sh`` with made-up machines: an environment and a PATH of small fake programs that note what happens to them."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]

LEARN = """\
import signal, sys
def learn(behaviour):
    if behaviour[0] == "ends":
        sys.exit(int(behaviour[1]))
    def save(*_):
        print("saved a checkpoint", flush=True)
        sys.exit(130)
    signal.signal(signal.SIGINT, save)
    print("training", flush=True)
    while True:
        signal.pause()
"""
"""A learner that ends, or waits for Ctrl-C, for programs that stand in for ``jax-agent-rl``."""

# A rollout server that answers health requests, and that learner.
_JAX_AGENT_RL = (
    LEARN
    + """\
import http.server, os, pathlib
folder = pathlib.Path(os.environ["FAKES"])
words = sys.argv[1:]
(folder / f"pid-{os.getpid()}").write_text(words[0])
if words[0] == "rollout-server":
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            right = self.headers["Authorization"] == "Bearer " + os.environ["JAX_AGENT_RL_TOKEN"]
            self.send_response(200 if right else 401)
            self.end_headers()
            self.wfile.write(b'{"ok": true}')
        def log_message(self, *_):
            pass
    address = words[words.index("--host") + 1], int(words[words.index("--port") + 1])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("closed the engine", flush=True)))
    http.server.ThreadingHTTPServer(address, Handler).serve_forever()
elif words[0] == "train":
    print("arguments:", *words[1:], flush=True)
    learn(os.environ.get("FAKE_LEARNER", "ends 0").split())
"""
)

_NVIDIA_SMI = """\
#!/usr/bin/env bash
echo "nvidia-smi on ${FAKE_HOST:-here}" >>"$FAKES/calls"
cat "$FAKES/gpus-${FAKE_HOST:-here}"
"""

_SSH = """\
#!/usr/bin/env bash
host="${*: -2:1}" command="${*: -1}"
echo "ssh $host" >>"$FAKES/calls"
if [ -e "$FAKES/refuses-$host" ]; then
  echo "ssh: connect to host $host port 22: Connection refused" >&2
  exit 255
fi
FAKE_HOST="$host" exec bash -c "$command"
"""

# A head listens on its port; a worker joins or, where its host is marked, does not.
_RAY = """\
import os, pathlib, signal, socket, sys
folder = pathlib.Path(os.environ["FAKES"])
host = os.environ.get("FAKE_HOST", "here")
if (folder / f"ray-fails-{host}").exists():
    sys.exit(print("ray: port 6379 is in use", flush=True) or 1)
(folder / f"pid-{os.getpid()}").write_text("ray")
options = dict(word.lstrip("-").split("=", 1) for word in sys.argv if "=" in word)
if "--head" in sys.argv:
    listener = socket.create_server((options["node-ip-address"], int(options["port"])))
signal.pause()
"""

_PYTHON = """\
#!/usr/bin/env bash
# Everything but pip, which notes what it should do, and Ray's driver, which stays and does nothing.
case "$*" in
  "-m pip "*) echo "$*" >>"$FAKES/calls" && exit ;;
  "-m jax_agent_rl.deploy.launch.ray_servers "*) exec sleep 1000 ;;
esac
exec {python} "$@"
"""


@dataclass
class Machines:
    """A folder with the fakes.

    Attributes:
        folder: ``tmp_path``.
        variables: more environment variables for the launcher.
    """

    folder: Path
    variables: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shebang = f"#!{sys.executable}\n"
        programs = {
            "venv/bin/jax-agent-rl": shebang + _JAX_AGENT_RL,
            "venv/bin/ray": shebang + _RAY,
            "venv/bin/python": _PYTHON.format(python=sys.executable),
            "path/nvidia-smi": _NVIDIA_SMI,
            "path/ssh": _SSH,
        }
        for name, text in programs.items():
            self.write(name, text).chmod(0o755)

    def write(self, name: str, text: str = "") -> Path:
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def use_real_ray(self) -> None:
        """Ray itself instead of its fakes."""
        self.write("venv/bin/ray", f'#!/usr/bin/env bash\nexec "{sys.executable}" -m ray.scripts.scripts "$@"\n')
        self.write("venv/bin/python", f'#!/usr/bin/env bash\nexec "{sys.executable}" "$@"\n')

    def gpus(self, count: int, *, host: str = "here", driver: str = "580.95.05") -> None:
        """What nvidia-smi lists on a host."""
        lines = [f"{i}, GPU-{host}-{i}, NVIDIA H100 80GB HBM3, {driver}\n" for i in range(count)]
        self.write(f"gpus-{host}", "".join(lines))

    @property
    def environment(self) -> dict[str, str]:
        own = {
            "PATH": f"{self.folder / 'path'}:{os.environ['PATH']}",
            "JAX_AGENT_RL_VENV": str(self.folder / "venv"),
            "PYTHON": sys.executable,
            "FAKES": str(self.folder),
        }
        # A test before this one may have had a Ray of its own in this process.
        others = ("CUDA_VISIBLE_DEVICES", "RAY_")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(others)}
        return inherited | own | self.variables

    def calls(self) -> list[str]:
        """Which fakes of PATH ran."""
        file = self.folder / "calls"
        return file.read_text().splitlines() if file.exists() else []

    def launch(self, *arguments: object, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Runs gpu.sh to its end."""
        command = [ROOT / "launch" / "gpu.sh", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, env=self.environment, timeout=timeout)

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        """Starts gpu.sh; both outputs are one pipe."""
        command = [ROOT / "launch" / "gpu.sh", *map(str, arguments)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=self.environment)

    def processes(self, kind: str) -> list[int]:
        """Ids of all fakes of a kind that ever ran."""
        return [int(f.name.removeprefix("pid-")) for f in self.folder.glob("pid-*") if f.read_text() == kind]


def read_until(process: subprocess.Popen[str], text: str) -> list[str]:
    """Lines up to the first that contains the text."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError(f"it ended before it said {text!r}:\n{''.join(lines)}")


def wait_for_end(pid: int, seconds: float = 60) -> None:
    """Waits for a process that need not be a child."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        assert poll.poll(seconds * 1000), f"process {pid} is still there"
    finally:
        os.close(descriptor)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def ended_after(process: subprocess.Popen[str], number: int = signal.SIGINT) -> Iterator[str]:
    """Sends a signal and yields what it says until it has ended."""
    process.send_signal(number)
    assert process.stdout is not None
    yield from process.stdout
    process.wait()
