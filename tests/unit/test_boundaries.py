"""Every place of the sources that reaches outside of the process, found by their syntax, keeps its
rule.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("jax_agent_rl", "gpu_backend", "benchmarks", "examples")
SOURCES = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
PACKAGE = [
    file for file in SOURCES if file.relative_to(ROOT).parts[0] in ("jax_agent_rl", "gpu_backend")
]


@functools.cache
def nodes_of(file: Path) -> list[ast.AST]:
    """Every node of a file's syntax tree."""
    return list(ast.walk(ast.parse(file.read_text())))


@functools.cache
def calls_of(file: Path) -> list[tuple[ast.Call, str]]:
    """Every call of a file with the text of what is called."""
    found_calls = []
    for node in nodes_of(file):
        if isinstance(node, ast.Call):
            found_calls.append((node, ast.unparse(node.func)))
    return found_calls


def place(file: Path, node: ast.AST) -> str:
    return f"{file.relative_to(ROOT)}:{node.lineno}"  # type: ignore[attr-defined]


def calls(files: list[Path]) -> Iterator[tuple[Path, ast.Call, str]]:
    """Every call with the text of what is called."""
    for file in files:
        for call, name in calls_of(file):
            yield file, call, name


# --- code that a model's folder brings ------------------------------------------------------------

RUNS_REMOTE_CODE = (
    "from_pretrained",
    "from_config",
    "load_dataset",
    "SentenceTransformer",
    "pipeline",
)
"""Functions of transformers, datasets and sentence-transformers that take ``trust_remote_code``."""


def own_classes() -> set[str]:
    names = set()
    for file in SOURCES:
        for node in nodes_of(file):
            if isinstance(node, ast.ClassDef):
                names.add(node.name)
    return names


def test_no_call_runs_or_asks_to_run_a_folders_code():
    own_receivers = {*own_classes(), "cls"}
    num_calls = 0
    for file, call, name in calls(SOURCES):
        receiver, _, function = name.rpartition(".")
        if function not in RUNS_REMOTE_CODE or receiver in own_receivers:
            continue
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert keywords.get("trust_remote_code") == "False", (
            f"{place(file, call)} leaves trust_remote_code to the library"
        )
        num_calls += 1
    assert num_calls >= 12


def test_nothing_trusts_remote_code():
    for file in SOURCES:
        for node in nodes_of(file):
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                assert ast.unparse(node.value) == "False", place(file, node)


def test_nothing_asks_the_terminal_of_a_run():
    asking = [place(file, call) for file, call, name in calls(PACKAGE) if name == "input"]
    assert asking == []


# --- YAML -----------------------------------------------------------------------------------------

YAML_READERS = (
    "load",
    "load_all",
    "safe_load",
    "safe_load_all",
    "full_load",
    "unsafe_load",
    "compose",
    "parse",
    "scan",
)


def test_yaml_is_read_with_bounds_alone():
    readers = {f"yaml.{name}" for name in YAML_READERS}
    readings = [
        place(file, call)
        for file, call, name in calls(SOURCES)
        if name in readers or name == "DatasetCard.load"
    ]
    assert readings == [], "read it by utils/yaml_text.py"


# --- clients --------------------------------------------------------------------------------------

CLIENT = re.compile(
    r"httpx2?\.(Async)?Client|httpx2?\.(get|post|put|head|stream|request)"
    r"|aiohttp\.(ClientSession|request)"
    r"|(urllib\.)?request\.(urlopen|urlretrieve)|urlopen|requests\.(get|post|put|head|Session)"
    r"|(http\.client\.|client\.)?HTTPS?Connection"
    r"|socket\.create_connection|asyncio\.open_(unix_)?connection"
    r"|snapshot_download|hf_hub_download|(\w+\.)?JobSubmissionClient"
    r"|websockets\.connect|(\w+\.)?websocket_connect"
)
CLIENTS = {
    "jax_agent_rl/utils/network.py": (
        "JsonService: read_answer, decode_json, a time limit for each attempt"
    ),
    "jax_agent_rl/rollout/http/connection.py": (
        "of rollout servers and SGLang's: read_answer, LineBuffer, decode_json, a limit of silence"
    ),
    "jax_agent_rl/rollout/http/membership.py": "read_answer, decode_json, COMMAND_SECONDS",
    "jax_agent_rl/environments/server_session.py": (
        "read_answer, MAX_MESSAGE_BYTES for messages, decode_json; environments.timeout"
    ),
    "jax_agent_rl/models/offered.py": (
        "no byte is read there; what JAX pulls has shapes that were checked, and _await_array"
    ),
    "jax_agent_rl/tool_server/worker.py": (
        "read_answer, decode_json; its own worker, killed when stuck"
    ),
    "jax_agent_rl/tools/mcp_transport.py": (
        "a bounded stream, MAX_MESSAGE_BYTES for events; calls have time limits"
    ),
    "jax_agent_rl/utils/hub.py": (
        "HEAD with a time limit, nothing is read; huggingface_hub downloads to the disk"
    ),
    "jax_agent_rl/deploy/quickstart/model.py": (
        "MAX_WHEEL_BYTES, a limit of silence; no token, and a known SHA-256"
    ),
    "jax_agent_rl/deploy/launch/__main__.py": "Ray's client of the user's own cluster",
    "jax_agent_rl/agents/command/runner.py": "copies bytes of a program's connection, keeps none",
    "jax_agent_rl/agents/command/relay.py": "copies bytes of a program's connection, keeps none",
    "jax_agent_rl/testing/redteam/on_servers.py": "a line or 64 KiB of an answer, ANSWER_SECONDS",
    "benchmarks/long_prompts.py": "this machine's own server, with a time limit",
    "benchmarks/tool_server.py": "this machine's own server",
    "examples/swe_mini/program/agent.py": "timeout=; the endpoint alone is in its reach",
}
"""Each file that makes a client of another program, and what bounds it."""


def test_every_client_is_known_with_its_bound():
    files = {
        str(file.relative_to(ROOT)) for file, _, name in calls(SOURCES) if CLIENT.fullmatch(name)
    }
    assert files == CLIENTS.keys()


def test_clients_ask_for_plain_answers_and_follow_no_redirect():
    for file, call, name in calls(PACKAGE):
        if not CLIENT.fullmatch(name) or not name.startswith(
            ("httpx.Async", "httpx2.Async", "aiohttp.ClientSession")
        ):
            continue
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert (
            "IDENTITY" in keywords["headers"]
            or "IDENTITY" in file.read_text().split(keywords["headers"] + " = ")[1][:200]
        )
        if name.startswith("aiohttp"):
            assert keywords["auto_decompress"] == "False", place(file, call)
        assert "follow_redirects" not in keywords, place(file, call)


def test_every_request_by_aiohttp_follows_no_redirect():
    """Its sessions follow them by default, with the token."""
    requests = ("get", "post", "put", "delete", "request")
    for name in (
        "rollout/http/client.py",
        "rollout/http/connection.py",
        "rollout/http/membership.py",
    ):
        file = ROOT / "jax_agent_rl" / name
        request_calls = [
            call
            for _, call, called in calls([file])
            if called.rpartition(".")[2] in requests
            and called.rpartition(".")[0]
            in ("self.client()", "self._connection.client()", "session")
        ]
        assert request_calls
        for call in request_calls:
            assert "allow_redirects=False" in ast.unparse(call) or "**options" in ast.unparse(
                call
            ), place(file, call)


# --- starts of other programs ---------------------------------------------------------------------

START = re.compile(
    r"ray\.init|JobSubmissionClient|jax\.distributed\.initialize|AsyncLLM\.from_engine_args|LLM"
    r"|subprocess\.(run|call|check_call|check_output|Popen)"
    r"|asyncio\.create_subprocess_(exec|shell)|os\.(system|popen)"
    r"|wandb\.(init|login|setup)|weave\.init|trackio\.init"
    r"|(self\._)?\w*(mlflow|trackio|weave)\.(set_experiment|init)|SummaryWriter"
    r"|webbrowser\.open|(\w+\.)?chromium\.launch|multiprocessing\.\w*Process|ctx\.Process"
)
STARTS = {
    "jax_agent_rl/runtime/ray_cluster.py": "start_service",
    "jax_agent_rl/deploy/launch/__main__.py": "start_service_blocking",
    "jax_agent_rl/deploy/launch/ray_driver.py": "start_service_blocking",
    "jax_agent_rl/runtime/multihost.py": "initialization_timeout",
    "gpu_backend/sglang/process.py": "ENGINE_START_SECONDS",
    "gpu_backend/launch.py": "start_service in gpu_backend/backend.py",
    "jax_agent_rl/observe/sinks/metrics.py": (
        "start_service_blocking, else the thread of a sink, which nothing awaits"
    ),
    "jax_agent_rl/observe/sinks/traces.py": "start_service_blocking",
    "jax_agent_rl/utils/worker_pool.py": "START_SECONDS",
    "jax_agent_rl/tool_server/worker.py": "_START_SECONDS",
    "jax_agent_rl/tool_server/sandbox/process.py": "wall_seconds",
    "jax_agent_rl/tool_server/sandbox/limits.py": "timeout=",
    "jax_agent_rl/tool_server/sandbox/isolation.py": "timeout=",
    "jax_agent_rl/agents/command/containers.py": "asyncio.timeout(seconds)",
    "jax_agent_rl/agents/command/runner.py": "the command itself, whose time the agent limits",
    "jax_agent_rl/tools/mcp_transport.py": "the timeout of MCPConnection",
    "jax_agent_rl/deploy/doctor/machine.py": "_PROBE_SECONDS",
    "jax_agent_rl/deploy/plan/command.py": "a compiler of this package, whose progress is shown",
    "jax_agent_rl/deploy/launch/ray_process.py": "the run itself",
    "jax_agent_rl/deploy/launch/tpu/gcloud.py": "a command whose lines are shown while it runs",
    "jax_agent_rl/deploy/launch/tpu/job.py": "timeout=",
    "jax_agent_rl/jetstream/cpu/kernels.py": "timeout=",
    "jax_agent_rl/deploy/quickstart/commands.py": "timeout=",
}
"""Each file that starts what runs outside of its process, and what bounds the time until it
answers."""


def test_every_start_of_another_program_is_known_with_its_bound():
    files = {
        str(file.relative_to(ROOT)) for file, _, name in calls(PACKAGE) if START.fullmatch(name)
    }
    assert files == STARTS.keys()
    for name, bound in STARTS.items():
        word = bound.split()[0].rstrip(",")
        if word.isupper() or word.endswith("=") or "start_service" in word:
            file = bound.rpartition(" in ")[2] if " in " in bound else name
            assert word in (ROOT / file).read_text(), f"{name} lost its bound"


def test_every_program_that_is_run_to_its_end_has_a_time_limit():
    for file, call, name in calls(PACKAGE):
        if name in (
            "subprocess.run",
            "subprocess.check_output",
            "subprocess.check_call",
            "subprocess.call",
        ):
            assert "timeout" in {keyword.arg for keyword in call.keywords}, place(file, call)


# --- servers --------------------------------------------------------------------------------------

SERVER = re.compile(
    r"HttpServer|web\.(Application|AppRunner|run_app|TCPSite|UnixSite|SockSite)"
    r"|asyncio\.start_(unix_)?server|(http\.server\.)?(Threading)?HTTPServer"
    r"|(socketserver\.)?\w*(TCP|UDP)Server|uvicorn\.\w+|FastAPI|Flask|grpc\.server"
)
SERVERS = {
    "jax_agent_rl/utils/http_server.py": (
        "HttpServer: bodies, heads, connections, Host, token, no compression"
    ),
    "jax_agent_rl/agents/endpoint/app.py": "HttpServer",
    "jax_agent_rl/observe/sinks/metrics.py": "HttpServer",
    "jax_agent_rl/rollout/http/membership.py": "HttpServer",
    "jax_agent_rl/rollout/http/server.py": "HttpServer",
    "jax_agent_rl/tinker_server/app.py": "HttpServer",
    "jax_agent_rl/tool_server/server.py": "HttpServer",
    "jax_agent_rl/tool_server/worker.py": (
        "a socket of its parent alone, which has checked what it sends"
    ),
    "jax_agent_rl/agents/command/relay.py": "Relay: MAX_CONNECTIONS, keeps no bytes",
    "jax_agent_rl/agents/command/session.py": (
        "one connection, with a token; MAX_HEADER_BYTES, and max_bytes of what follows"
    ),
    "jax_agent_rl/agents/command/runner.py": "Relay: MAX_CONNECTIONS, keeps no bytes",
}
"""Each file that makes a server, and what bounds what its clients send."""


def test_every_server_is_known_with_its_bounds():
    files = {
        str(file.relative_to(ROOT)) for file, _, name in calls(PACKAGE) if SERVER.fullmatch(name)
    }
    assert files == SERVERS.keys()


def test_every_http_server_is_one_whose_routes_are_all_tried():
    """tests/unit/test_routes.py tries them; there a new route fails until it has a valid body."""
    makers = {
        file.stem if file.stem != "app" else file.parent.name
        for file in SOURCES
        if makes_http_server(file)
    }
    tried = {
        "endpoint",
        "metrics",
        "membership",
        "server",
        "tinker_server",
    }  # server: of rollout, and of tools
    assert makers == tried


def makes_http_server(file: Path) -> bool:
    return any(name == "HttpServer" for _, _, name in calls([file]))


# --- tokens ---------------------------------------------------------------------------------------


def test_no_token_begins_with_a_dash():
    """Other programs get tokens as arguments and would take such a one for an option."""
    found = [place(file, call) for file, call, name in calls(SOURCES) if "token_urlsafe" in name]
    assert found == [], "take secrets.token_hex"
