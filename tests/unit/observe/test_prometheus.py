"""What servers and runs tell Prometheus, read back by prometheus_client's own parser."""

import socket
import urllib.request
from dataclasses import fields

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jax_agent_rl.errors import ConfigError
from jax_agent_rl.observe.sinks.metrics import serve_trainer
from jax_agent_rl.rollout.engine_metrics import engine_families
from jax_agent_rl.rollout.protocol import BackendMetrics, Capabilities, Health
from jax_agent_rl.utils.prometheus import RequestCounts, exposition_text
from tests.messages import raises

CAPABILITIES = Capabilities(max_model_len=64, max_concurrent=4)


def read(text: bytes) -> dict[tuple[str, ...], float]:
    """Samples by name and label values."""
    families = text_string_to_metric_families(text.decode())
    values = {}
    for family in families:
        for sample in family.samples:
            values[sample.name, *sample.labels.values()] = sample.value
    return values


def test_everything_an_engine_counts_has_a_name_and_says_what_it_is():
    families = engine_families(BackendMetrics(), Health(ok=True), CAPABILITIES, engine="a")
    said = {family.name: family.documentation for family in families}
    assert all(said[f"jax_agent_rl_engine_{field.name}"] for field in fields(BackendMetrics))


def test_engines_differ_by_label_under_one_heading():
    health = Health(ok=True, policy_version=7, running=2, waiting=1, kv_used_share=0.25)
    text = exposition_text(
        [
            *engine_families(BackendMetrics(generated_tokens=10), health, CAPABILITIES, engine="a"),
            *engine_families(
                BackendMetrics(generated_tokens=20), Health(ok=False), CAPABILITIES, engine="b"
            ),
        ]
    )
    samples = read(text)
    assert text.count(b"# TYPE jax_agent_rl_engine_generated_tokens_total counter") == 1
    assert [samples["jax_agent_rl_engine_generated_tokens_total", name] for name in "ab"] == [
        10,
        20,
    ]
    assert [samples["jax_agent_rl_engine_up", name] for name in "ab"] == [1, 0]
    gauges = (
        "policy_version",
        "requests_running",
        "requests_waiting",
        "max_concurrent",
        "kv_used_share",
    )
    assert [samples[f"jax_agent_rl_engine_{name}", "a"] for name in gauges] == [7, 2, 1, 4, 0.25]
    assert ("jax_agent_rl_engine_kv_used_share", "b") not in samples  # an engine that does not say


def test_requests_are_counted_by_path_and_status():
    counts = RequestCounts()
    with counts.request("/a") as status:
        assert (
            read(exposition_text(counts.families()))["jax_agent_rl_server_requests_running",] == 1
        )
        status.append(200)
    with pytest.raises(KeyError), counts.request("/a"):
        raise KeyError
    samples = read(exposition_text(counts.families()))
    assert samples["jax_agent_rl_server_requests_total", "/a", "200"] == 1
    assert samples["jax_agent_rl_server_requests_total", "/a", "499"] == 1
    assert samples["jax_agent_rl_server_requests_running",] == 0


def test_a_run_serves_its_newest_metrics_to_this_machine_until_it_ends():
    said: list[str] = []
    with serve_trainer(0, print_line=said.append) as metrics:
        url = said[0].rpartition(" ")[2]
        assert url.startswith("http://127.0.0.1:")
        metrics({"kind": "step", "step": 4, "reward_mean": 0.5, "dropped/stale": 2})
        metrics({"kind": "step", "step": 5, "reward_mean": 0.75})
        metrics({"kind": "evaluation", "step": 5, "accuracy": 0.25})
        with urllib.request.urlopen(url, timeout=10) as answer:
            samples = read(answer.read())
        names = ("step", "reward_mean", "evaluation_step", "evaluation_accuracy", "dropped_stale")
        assert [samples[f"jax_agent_rl_train_{name}",] for name in names] == [5, 0.75, 5, 0.25, 2]
    with pytest.raises(OSError), urllib.request.urlopen(url, timeout=10):
        pass


def test_a_port_in_use_is_a_setting_to_change():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with raises(ConfigError, key="trainer.prometheus_port", value=port):
            with serve_trainer(port, print_line=print):
                pass
