"""A small harness for bug fixes, of the standard library alone. It knows of no training.

It runs ``check.py``, shows the model the file and what the check says, replaces the line that the
model names, and tries again.
"""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

MAX_ATTEMPTS = 3
FILE = Path("solution.py")
SYSTEM = "Fix the bug: write the wrong line after -, and the right line after +. Nothing else."
EXAMPLES = [
    (
        'def double(n):\n    """Return n times 2."""\n    return n * 3\n\n'
        "double(4) is 12, but it should be 8.",
        "- return n * 3\n+ return n * 2",
    ),
    (
        'def second(items):\n    """Return the second item."""\n    return items[2]\n\n'
        "second([7, 8, 9]) is 9, but it should be 8.",
        "- return items[2]\n+ return items[1]",
    ),
    (
        'def below(a, b):\n    """Return whether a is less than b."""\n    return a > b\n\n'
        "below(1, 2) is False, but it should be True.",
        "- return a > b\n+ return a < b",
    ),
]


def main() -> None:
    """Work on the file until the check succeeds."""
    messages = [{"role": "system", "content": SYSTEM}]
    for problem, edit in EXAMPLES:
        messages.append({"role": "user", "content": problem})
        messages.append({"role": "assistant", "content": edit})
    messages.append({"role": "user", "content": f"{FILE.read_text()}\n{check()}"})

    for _ in range(MAX_ATTEMPTS):
        reply = ask(messages)
        problem = apply(reply) or check()
        print(f"{reply}\n{problem}", flush=True)
        if not problem:
            return
        messages.append({"role": "assistant", "content": reply})
        messages.append({"role": "user", "content": problem})


def check() -> str:
    """Return what check.py finds wrong; empty: nothing."""
    done = subprocess.run([sys.executable, "check.py"], capture_output=True, text=True, timeout=10)
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines() or ["check.py failed."]
    return lines[-1][:160]


def ask(messages: list[dict[str, str]]) -> str:
    """Return the model's reply."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        data=json.dumps({"model": "policy", "messages": messages, "max_tokens": 40}).encode(),
        headers={
            "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
            "Content-Type": "application/json",
        },
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def apply(reply: str) -> str:
    """Replace the line that the reply names; return why not, or nothing."""
    lines = reply.strip().splitlines()
    if len(lines) != 2 or lines[0][:1] != "-" or lines[1][:1] != "+":
        return "Write one line after - and one after +."
    wrong = lines[0][1:].strip()
    right = lines[1][1:].strip()

    source = FILE.read_text().splitlines()
    for number, line in enumerate(source):
        if line.strip() == wrong:
            indentation = line[: len(line) - len(line.lstrip())]
            source[number] = indentation + right
            FILE.write_text("\n".join(source) + "\n")
            return ""
    return f"There is no line {wrong!r}."


main()
