"""Where traces go: files, MLflow, trackio, Weave; and a slow or failing one, which never holds up a
run.
"""

import datetime
import json
import sys
import threading
from contextvars import ContextVar
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from jax_agent_rl.config import TraceConfig
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.observe.run_dir import RunDir, read_records
from jax_agent_rl.observe.sinks import traces as sinks
from jax_agent_rl.observe.sinks.traces import MAX_FAILURES, TraceSinks, open_tracer, shortened
from jax_agent_rl.utils.packages import install_command
from tests.messages import assert_message, raises
from tests.trajectories import EPOCH, SECOND, a_trace


class Keeps:
    def __init__(self, fails: bool = False) -> None:
        self.taken = []
        self.closed = threading.Event()
        self.fails = fails
        self.tried = 0

    def write(self, trace):
        self.tried += 1
        if self.fails:
            raise OSError("out of reach")
        self.taken.append(trace)

    def close(self):
        self.closed.set()


def test_a_line_of_the_file_holds_the_whole_trace(tmp_path: Path):
    run_dir = RunDir(tmp_path)
    sinks.TraceFileSink(TraceConfig(), run_dir).write(a_trace())
    (record,) = read_records(run_dir.traces)
    assert (record["trajectory_id"], record["step"], record["sample"], record["rollout"]) == (
        "train-3-1-2",
        3,
        1,
        2,
    )
    assert [s["name"] for s in record["spans"]] == ["run", "wait", "generate", "tool", "reward"]
    assert record["spans"][3]["start_ns"] == EPOCH + 2 * SECOND
    assert record["spans"][4]["error"] == "ValueError: no"


def test_of_long_texts_both_ends_are_kept_wherever_they_stand():
    value = {"messages": [{"content": "a" * 50 + "b" * 50}], "n": 3, "odd": {1: Path("x")}}
    assert shortened(value, 10) == {
        "messages": [{"content": "aaaaa … bbbbb"}],
        "n": 3,
        "odd": {"1": "x"},
    }


def test_resuming_cuts_traces_back_too(tmp_path: Path):
    run_dir = RunDir(tmp_path)
    sink = sinks.TraceFileSink(TraceConfig(), run_dir)
    for step, validate in ((2, False), (3, False), (0, True), (2, True)):
        sink.write(a_trace(step=step, validate=validate))
    run_dir.add_metrics({"kind": "evaluation", "step": 0})
    run_dir.resume_after(2)
    sink.write(a_trace(step=3, validate=False))
    assert len(read_records(run_dir.traces)) == 5
    run_dir.finish_step(3)
    steps = [(r["step"], r["validate"]) for r in read_records(run_dir.traces)]
    assert steps == [
        (2, False),
        (0, True),
        (3, False),
    ], "the evaluation after step 2 was not recorded: it never ended"


def test_every_sink_gets_every_trace_and_is_closed():
    first = Keeps()
    second = Keeps()
    threads = TraceSinks({"one": first, "other": second})
    for _ in range(3):
        threads.put(a_trace())
    threads.close()
    assert len(first.taken) == len(second.taken) == 3
    assert first.closed.is_set()
    assert second.closed.is_set()
    assert threads.lost() == {}


def test_a_sink_works_in_the_context_it_was_opened_in():
    setting = ContextVar("setting", default="default")
    seen = []
    sink = Keeps()
    sink.write = lambda trace: seen.append(setting.get())
    setting.set("changed")
    threads = TraceSinks({"one": sink})
    threads.put(a_trace())
    threads.close()
    assert seen == ["changed"]


async def test_a_sink_of_a_run_works_in_the_context_that_opening_it_made(
    tmp_path: Path, monkeypatch
):
    setting = ContextVar("setting", default="default")
    seen = []

    def open_sink(config, run_dir):
        setting.set("opened")
        sink = Keeps()
        sink.write = lambda trace: seen.append(setting.get())
        return sink

    monkeypatch.setitem(sinks.SINKS, "files", open_sink)
    (opened,) = sinks.open_sinks(TraceConfig(sinks=("files",)), RunDir(tmp_path)).values()
    threads = TraceSinks({"files": opened})
    threads.put(a_trace())
    threads.close()
    assert (seen, setting.get()) == (["opened"], "default")


async def test_a_sink_whose_server_never_answers_is_named(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sinks.SINKS, "mlflow", lambda config, run_dir: threading.Event().wait())
    monkeypatch.setattr(sinks, "OPENING_SECONDS", 0.01)
    with raises(ConfigError, key=("trace.sinks", "mlflow"), value="0.01 seconds"):
        async with open_tracer(TraceConfig(sinks=("mlflow",)), RunDir(tmp_path)):
            pass


def test_a_sink_that_fails_is_given_up_and_counted_and_the_others_go_on(caplog):
    bad = Keeps(fails=True)
    good = Keeps()
    threads = TraceSinks({"bad": bad, "good": good})
    for _ in range(MAX_FAILURES + 3):
        threads.put(a_trace())
    threads.close()
    assert len(good.taken) == MAX_FAILURES + 3
    assert bad.tried == MAX_FAILURES
    assert threads.lost()["bad"] == MAX_FAILURES + 3
    assert_message(caplog.text, key="bad", value=f"{MAX_FAILURES + 3} traces")
    assert "out of reach" in caplog.text
    assert_message(caplog.text, key="bad", value=(f"{MAX_FAILURES} times", "disabled"))


def test_a_sink_that_hangs_loses_traces_but_nobody_waits_for_it(caplog):
    hanging = Keeps()
    writing = threading.Event()
    go_on = threading.Event()

    def write(trace):
        writing.set()
        go_on.wait(60)

    hanging.write = write
    threads = TraceSinks({"slow": hanging}, capacity=2)
    threads.put(a_trace())
    writing.wait(60)
    for _ in range(5):
        threads.put(a_trace())
    assert threads.lost() == {"slow": 3}
    threads.close(seconds=0.0)
    assert_message(caplog.text, key="slow", value="5 traces")
    go_on.set()
    assert hanging.closed.wait(60)


async def test_without_sinks_there_is_no_tracer(tmp_path: Path):
    async with open_tracer(TraceConfig(), RunDir(tmp_path)) as tracer:
        assert tracer is None


async def test_a_tracer_writes_what_was_traced_before_it_closes(tmp_path: Path):
    run_dir = RunDir(tmp_path)
    async with open_tracer(
        TraceConfig(sinks=("files",), max_trajectories_per_step=1), run_dir
    ) as tracer:
        for rollout in range(2):
            with tracer.trajectory(
                trajectory_id=f"t-{rollout}",
                group_id="t",
                group_size=2,
                step=1,
                sample=0,
                rollout=rollout,
                validate=False,
            ):
                pass
    assert [record["trajectory_id"] for record in read_records(run_dir.traces)] == ["t-0"]


def test_a_sink_whose_package_is_missing_is_a_message(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with raises(ConfigError, key="weave", fix=install_command("trace")):
        sinks.open_sinks(TraceConfig(sinks=("weave",)), RunDir(tmp_path))


def test_mlflow_shows_a_trace_with_its_spans(tmp_path: Path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    run_dir = RunDir(tmp_path / "run")
    (opened,) = sinks.open_sinks(TraceConfig(sinks=("mlflow",)), run_dir).values()
    opened.write(a_trace())
    opened.close()
    assert (run_dir.path / "mlflow.db").is_file()
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
    (stored,) = mlflow.search_traces(return_type="list", filter_string="tags.rollout = '2'")
    assert stored.info.tags["step"] == "3"
    assert stored.info.tags["validate"] == "false"
    assert stored.info.tags["run"] == "run"
    spans = {s.name: s for s in stored.data.spans}
    assert list(spans) == ["run train-3-1-2", "wait slot", "generate", "tool add", "reward sums"]
    assert spans["tool add"].inputs == {"arguments": {"a": 1}}
    assert spans["tool add"].outputs == {
        "observation": "Error",
        "error": "timeout",
    }
    assert spans["tool add"].start_time_ns == EPOCH + 2 * SECOND
    assert spans["generate"].span_type == "LLM"
    assert spans["generate"].attributes["stop_reason"] == "eos"
    assert spans["generate"].parent_id == spans["run train-3-1-2"].span_id
    failed = [name for name, span in spans.items() if span.status.status_code == "ERROR"]
    assert failed == ["tool add", "reward sums"]


def test_trackio_keeps_a_trace_with_its_spans(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    trackio = pytest.importorskip("trackio")
    logged = []

    class Run:
        def log(self, values, *, step):
            logged.append((step, values["trace"]._to_dict(project="p", run="r")))

        def finish(self):
            logged.append("finished")

    monkeypatch.setattr(trackio, "init", lambda project, **settings: Run())
    (opened,) = sinks.open_sinks(TraceConfig(sinks=("trackio",)), RunDir(tmp_path / "run")).values()
    opened.write(a_trace())
    opened.close()
    (step, trace), end = logged
    assert step == 3
    assert end == "finished"
    assert trace["messages"][1] == {"role": "assistant", "content": "3"}
    assert trace["metadata"]["rollout"] == "2"
    assert trace["metadata"]["reward"] == 1.0
    tool = trace["spans"][3]
    assert (tool["kind"], tool["parent_id"], tool["duration_ms"]) == ("tool", "0", 1000.0)
    assert [(s["status"], s.get("error")) for s in trace["spans"][2:]] == [
        ("ok", None),
        ("error", "timeout"),
        ("error", "ValueError: no"),
    ]


class FakeWeave(ThreadingHTTPServer):
    """Answers what a Weave client asks, and keeps the calls it is sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.requests: list[tuple[str, dict]] = []

    def calls(self) -> dict[str, dict]:
        """Calls by what they are called."""
        batches = (
            body["batch"] for path, body in self.requests if path.endswith("/calls/complete")
        )
        return {call["display_name"]: call for batch in batches for call in batch}


class _Answers(BaseHTTPRequestHandler):
    def do_POST(self):
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Content-Type"] == "application/json":  # files are not
            self.server.requests.append((self.path, json.loads(content)))
        if self.path == "/graphql":  # does the project exist?
            self._send({"data": {"project": {"name": "project"}, "model": {"name": "project"}}})
        else:
            self._send({"digest": "d" * 43, "id": "i", "trace_id": "t", "res": []})

    def do_GET(self):
        self._send({"min_required_weave_python_version": "0.0.1"})

    def _send(self, answer):
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        """Silent."""


@pytest.fixture
def weave_server():
    server = FakeWeave()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def open_weave(tmp_path: Path, monkeypatch, weave_server):
    pytest.importorskip("weave")
    address = f"http://127.0.0.1:{weave_server.server_port}"
    for name, value in {
        "WF_TRACE_SERVER_URL": address,
        "WANDB_BASE_URL": address,
        "WANDB_API_KEY": "k" * 40,
        "WANDB_ERROR_REPORTING": "false",
        "HOME": str(tmp_path),
    }.items():
        monkeypatch.setenv(name, value)
    # MCP's own OpenTelemetry spans of later tests would be sent to it, long after this server ends.
    monkeypatch.setattr("weave.trace.weave_init._setup_conversation_tracing", lambda *project: None)
    config = TraceConfig(sinks=("weave",), project="team/project")
    return lambda: sinks.open_sinks(config, RunDir(tmp_path / "run"))["weave"]


def test_weave_is_sent_a_call_for_each_span(open_weave, weave_server):
    opened = open_weave()
    opened.write(a_trace())
    opened.close()
    calls = weave_server.calls()
    assert set(calls) == {"run train-3-1-2", "wait slot", "generate", "tool add", "reward sums"}
    assert calls["tool add"]["parent_id"] == calls["run train-3-1-2"]["id"]
    assert calls["tool add"]["inputs"] == {"arguments": {"a": 1}}
    assert calls["generate"]["attributes"]["stop_reason"] == "eos"
    assert calls["generate"]["attributes"]["step"] == "3"
    assert "ValueError: no" in calls["reward sums"]["exception"]
    assert "timeout" in calls["tool add"]["exception"]
    began = datetime.datetime.fromisoformat(calls["tool add"]["started_at"])
    assert began.timestamp() * SECOND == EPOCH + 2 * SECOND


def test_weave_wraps_no_client_of_tools(open_weave):
    """By default it replaces methods of imported packages, and hooks the import of others."""
    session = pytest.importorskip("mcp").ClientSession
    open_weave().close()
    assert session.call_tool.__module__ == session.__module__
    assert not [
        finder
        for finder in sys.meta_path
        if type(finder).__module__.startswith("weave.integrations")
    ]
