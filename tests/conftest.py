"""Compiled programs are kept between tests and runs: many tests build the same small engine. Files
run side by side, where the machine has room for that, but those that start Ray one after another.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib.util
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jax_agent_rl.runtime.ray_cluster import secure_own_cluster
from jax_agent_rl.utils.files import cache_root
from tests.examples import load_profile
from tests.simulated import COMPILE_QUICKLY
from tests.slow import SLOW, has_structural, is_nightly, is_slow, is_structural

if importlib.util.find_spec(
    "libtpu"
):  # it is there to compile for slices, and would complain that there is none
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", COMPILE_QUICKLY)
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache_root() / "xla-tests"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# What a script starts in the background ignores Ctrl-C, and so would the programs that tests
# interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
load_profile()
secure_own_cluster()  # before a test of vLLM imports Ray
pytest.register_assert_rewrite("jax_agent_rl.testing.conformance.suite")

TESTS = Path(__file__).parent
GROWTH_BYTES = 2**30
kept_bytes = 3 * 2**30
"""Memory of a worker above which its compiled programs and traces are dropped after a file."""

WITH_RAY = {
    "tests/conformance/test_conformance.py",
    "tests/e2e/test_ray_job.py",
    "tests/e2e/test_ray_engines.py",
}


class FailuresAtOnce:
    """Names what failed when it does: a whole run takes a while, and ends with the details."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        screen = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and screen is not None:
            screen.write_line(
                f"\n{'failed' if report.when == 'call' else 'error'}: {report.nodeid}"
            )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FailuresAtOnce(config))


@pytest.fixture(scope="module", autouse=True)
def _one_thread_of_torch() -> None:
    """Compute small models of torch without threads, which cost three times what they save.

    No variable says so: engines of vLLM, which tests start, read the same.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def _freeze_what_a_file_leaves() -> Iterator[None]:
    """Keep the garbage collector off traces and programs that stay: it took up to 40 % of a
    worker's time.

    They do not stay where they would leave the machine without memory: several workers run side by
    side.
    """
    global kept_bytes
    yield
    jax = sys.modules.get("jax")
    if jax is not None and _resident_bytes() > kept_bytes:
        jax.clear_caches()
        gc.unfreeze()
        gc.collect()
        _return_freed_memory()
        kept_bytes = max(kept_bytes, _resident_bytes() + GROWTH_BYTES)
    gc.collect()
    gc.freeze()


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _return_freed_memory() -> None:
    """Have the allocator return what it keeps, where it can: glibc does."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def pytest_collection() -> None:
    """Collect tests without the garbage collector: all of them stay, and looking through them again
    and again took a fifth of the time of each worker.
    """
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """A thread that a failed test left waiting would keep the process from ending."""
    threading.Thread(target=_end_without_other_threads, daemon=True).start()


def _end_without_other_threads() -> None:
    threading.main_thread().join()  # a worker's goes on until all workers have run their tests
    time.sleep(60)
    faulthandler.dump_traceback()
    os._exit(1)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files of which nothing would run: importing them takes seconds in each worker."""
    if collection_path.suffix != ".py" or not collection_path.is_relative_to(TESTS):
        return None
    name = collection_path.relative_to(TESTS).as_posix()
    selected = config.option.markexpr
    if "not slow" in selected and name in SLOW:
        return True
    if selected.startswith("structural and") and not has_structural(name):
        return True
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_structural(item.nodeid):
            item.add_marker(pytest.mark.structural)
        if is_slow(item.nodeid):
            item.add_marker(pytest.mark.slow)
        if is_nightly(item.nodeid):
            item.add_marker(pytest.mark.nightly)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A file at a time to each worker. Two clusters that start at once on one machine look for the
    same ports.
    """
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "Ray" if file in WITH_RAY else file

    return Scheduling(config, log)
