"""Answers compared by value, in worker processes that never outstay their time."""

import sys
import threading
import time

import pytest

from jax_agent_rl.errors import RewardError, RewardTimeoutError
from jax_agent_rl.rewards.rules import POOL, math_equal
from jax_agent_rl.rewards.workers import WorkerPool
from jax_agent_rl.utils.packages import install_command
from tests.messages import raises

ECHO = "import sys, json\nfor line in sys.stdin:\n    print(line, end='', flush=True)\n"
HANG_ON_SLOW = (
    "import sys, json, time, signal, os\n"
    "for line in sys.stdin:\n"
    "    if 'slow' in line:\n"
    "        open(json.loads(line).get('mark', os.devnull), 'w').close()\n"
    "        signal.pause()\n"
    "    print(json.dumps({'pid': os.getpid()}), flush=True)\n"
)


@pytest.fixture
def worker():
    """Makes a pool whose workers run the given code."""
    pools = []

    def make(code, *, size=1):
        pools.append(WorkerPool(code, size=size, purpose="helping"))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.mark.parametrize(
    ("solution", "truth", "score"),
    [
        (r"so the answer is \boxed{\frac{1}{2}}", r"0.5", 1.0),
        (r"\boxed{0.5}", r"\frac12", 1.0),
        (r"x = 3 or x = 5, hence \boxed{\{3, 5\}}", r"\{5,3\}", 1.0),
        (r"\boxed{2\sqrt{2}}", r"\sqrt{8}", 1.0),
        (r"\boxed{x^2+2x+1}", r"(x+1)^2", 1.0),
        (r"first \boxed{7}, no: \boxed{8}", "8", 1.0),
        (r"\boxed{3}", "4", 0.0),
        ("I do not know", "4", 0.0),
    ],
)
def test_equal_values_are_equal_answers(solution, truth, score):
    pytest.importorskip("math_verify")
    assert math_equal(solution, truth)["score"] == score


def test_an_answer_without_mathematics_was_not_answered():
    pytest.importorskip("math_verify")
    assert math_equal("I do not know", "4") == {"score": 0.0, "answered": 0.0}


def test_a_truth_that_is_no_mathematics_is_a_fault_of_the_data():
    pytest.importorskip("math_verify")
    with raises(RewardError, key="ground_truth", value="''"):
        math_equal(r"\boxed{1}", "")


def test_it_works_in_any_thread_and_the_worker_is_kept():
    pytest.importorskip("math_verify")
    scores = []
    threads = [
        threading.Thread(target=lambda: scores.append(math_equal(r"\boxed{1}", "1")["score"]))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert scores == [1.0] * 6
    POOL.close()


def test_a_worker_that_hangs_is_killed_and_the_next_question_is_answered(worker):
    pool = worker(HANG_ON_SLOW)
    first = pool.ask({"q": "quick"}, timeout=30)["pid"]
    assert pool.ask({"q": "quick"}, timeout=30)["pid"] == first
    with raises(RewardTimeoutError, key="helping", value="0.05 seconds"):
        pool.ask({"q": "slow"}, timeout=0.05)
    assert pool.ask({"q": "quick"}, timeout=30)["pid"] != first


def test_a_question_waits_for_a_worker_no_longer_than_its_time(worker, tmp_path):
    pool = worker(HANG_ON_SLOW)
    failures = []
    started_file = tmp_path / "begun"

    def occupy():
        try:
            pool.ask({"q": "slow", "mark": str(started_file)}, timeout=3)
        except RewardTimeoutError as error:
            failures.append(error)

    thread = threading.Thread(target=occupy)
    thread.start()
    while not started_file.exists():  # until it has the only worker
        time.sleep(0.001)
    with raises(RewardTimeoutError, key="worker was free", value="0.05 seconds"):
        pool.ask({"q": "quick"}, timeout=0.05)
    thread.join()
    assert len(failures) == 1


def test_a_worker_that_dies_is_an_error_and_replaced(worker):
    pool = worker(
        "import sys, os\n"
        "os._exit(7) if 'die' in sys.stdin.readline() else print('{}', flush=True)\n"
    )
    with raises(RewardError, key="helping", value="ended"):
        pool.ask({"q": "die"}, timeout=30)
    assert pool.ask({"q": "live"}, timeout=30) == {}


def test_a_module_that_cannot_be_run_is_an_error(capfd):
    with pytest.raises(RewardError, match="the worker ended"):
        WorkerPool("no_such_module_here", size=1, purpose="helping").ask({}, timeout=30)
    assert "no_such_module_here" in capfd.readouterr().err


def test_large_questions_and_answers_pass_the_pipes_whole(worker):
    text = "x" * 3_000_000 + "ü\n"
    assert worker(ECHO).ask({"text": text}, timeout=60) == {"text": text}


def test_an_error_of_the_worker_reaches_the_caller(worker):
    pool = worker(
        'import sys\nfor line in sys.stdin:\n    print(\'{"error": "no luck"}\', flush=True)\n'
    )
    with pytest.raises(RewardError, match="helping: no luck"):
        pool.ask({}, timeout=30)


def test_a_worker_without_the_library_says_how_to_get_it(monkeypatch):
    from jax_agent_rl.rewards import workers

    monkeypatch.setitem(sys.modules, "math_verify", None)
    monkeypatch.setattr("logging.disable", lambda level: None)
    answer = workers.answer({"solution": "1", "truth": "1", "seconds": 1})
    assert install_command("math") in answer["error"]
