"""A small terminal agent: asks a model for one shell command after the other and runs them. It
knows of no training.
"""

import os
import subprocess

import openai

MAX_COMMANDS = 3
EXAMPLES = [
    ("Write the word pear into fruit.txt.", "echo pear > fruit.txt"),
    ("Copy notes.txt to old.txt.", "cp notes.txt old.txt"),
    ("Count the lines of log.txt into total.txt.", "wc -l < log.txt > total.txt"),
    ("Write the first line of list.txt into top.txt.", "head -n 1 list.txt > top.txt"),
]


def main() -> None:
    """Work on the task until a command succeeds."""
    messages = [
        {"role": "system", "content": "Answer each task with one shell command, and nothing else."}
    ]
    for task, command in EXAMPLES:
        messages += [{"role": "user", "content": task}, {"role": "assistant", "content": command}]
    messages.append({"role": "user", "content": os.environ["TASK_INSTRUCTION"].strip()})
    client = openai.OpenAI()
    for _ in range(MAX_COMMANDS):
        answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=24)
        command = answer.choices[0].message.content
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=10)
        print(f"$ {command}\n{done.stdout}{done.stderr}", flush=True)
        if done.returncode == 0:
            return
        messages += [
            {"role": "assistant", "content": command},
            {"role": "user", "content": f"{done.stderr.strip()[-80:]}\nTry another command."},
        ]


main()
