"""Writes a SQLite database of invented books, and questions about it: ``python
examples/sql_agent/prepare.py``.

The prompt shows the table and three questions answered with a query; others need another column or
aggregate.
"""

from __future__ import annotations

import argparse
import json
import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SYSTEM = (
    "You answer questions about the table books(title, author, year, pages, price). First write"
    " <sql> with a query </sql>, then read the <observation>, then answer."
)
AUTHORS = (
    "Ada Brook",
    "Ben Hale",
    "Cora Lind",
    "Dan Moss",
    "Eva Stone",
    "Finn Ward",
    "Gail Reed",
    "Hugo Park",
)
TITLES = (
    (
        "Silver",
        "Quiet",
        "Burning",
        "Last",
        "Hidden",
        "Winter",
        "Broken",
        "Golden",
        "Distant",
        "Red",
    ),
    (
        "Garden",
        "River",
        "Letter",
        "Harbour",
        "Mirror",
        "Road",
        "Tower",
        "Island",
        "Orchard",
        "Bell",
    ),
)
QUESTIONS = (  # question, query
    ("How many books did {author} write?", "SELECT COUNT(*) FROM books WHERE author = '{author}'"),
    ("How many pages has {title}?", "SELECT pages FROM books WHERE title = '{title}'"),
    (
        "How many books were published before {year}?",
        "SELECT COUNT(*) FROM books WHERE year < {year}",
    ),
    ("What does {title} cost?", "SELECT price FROM books WHERE title = '{title}'"),
    ("In which year was {title} published?", "SELECT year FROM books WHERE title = '{title}'"),
    (
        "How many books of {author} cost more than {price}?",
        "SELECT COUNT(*) FROM books WHERE author = '{author}' AND price > {price}",
    ),
    (
        "What does the most expensive book published before {year} cost?",
        "SELECT MAX(price) FROM books WHERE year < {year}",
    ),
    (
        "How many pages has the longest book published after {year}?",
        "SELECT MAX(pages) FROM books WHERE year > {year}",
    ),
)
WORKED = 3  # of these kinds, in the prompt


def main() -> None:
    """Writes ``databases/books.sqlite``, ``train.jsonl`` and ``heldout.jsonl``, and prints their
    paths.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("data/sql_agent"))
    parser.add_argument("--train", type=int, default=160)
    parser.add_argument("--heldout", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    books = invent(rng)
    database = arguments.out / "databases" / "books.sqlite"
    database.parent.mkdir(parents=True, exist_ok=True)
    database.unlink(missing_ok=True)
    with sqlite3.connect(database) as connection:
        connection.execute(
            "CREATE TABLE books (title TEXT, author TEXT, year INTEGER, pages INTEGER, price"
            " INTEGER)"
        )
        connection.executemany(
            "INSERT INTO books VALUES (:title, :author, :year, :pages, :price)", books
        )
        print(f"{database}: {len(books)} books")
        worked = [
            ask(connection, *kind, book)
            for kind, book in zip(QUESTIONS[:WORKED], books, strict=False)
        ]
        questions = ask_all(connection, books, rng, {question for question, _, _ in worked})
        for name, count in (("heldout", arguments.heldout), ("train", arguments.train)):
            file = arguments.out / f"{name}.jsonl"
            rows = (row_of(*next(questions), worked) for _ in range(count))
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
            print(f"{file}: {count} rows")


def invent(rng: random.Random) -> list[dict[str, Any]]:
    """Books, each with a title of its own."""
    titles = [f"The {first} {second}" for first in TITLES[0] for second in TITLES[1]]
    rng.shuffle(titles)
    return [
        {
            "title": title,
            "author": rng.choice(AUTHORS),
            "year": rng.randint(1900, 2020),
            "pages": rng.randint(80, 900),
            "price": rng.randint(5, 60),
        }
        for title in titles
    ]


def ask(
    connection: sqlite3.Connection, question: str, query: str, book: dict[str, Any]
) -> tuple[str, str, str]:
    """A question about what a book has, its query, and the answer."""
    query = query.format(**book)
    ((answer,),) = connection.execute(query)
    return question.format(**book), query, str(answer)


def ask_all(
    connection: sqlite3.Connection, books: list[dict[str, Any]], rng: random.Random, seen: set[str]
) -> Iterator[tuple[str, str, str]]:
    """Different questions, kinds in turn."""
    while True:
        for kind in QUESTIONS:
            question, query, answer = ask(connection, *kind, rng.choice(books))
            if question not in seen and answer != "None":  # no book is older than the oldest
                seen.add(question)
                yield question, query, answer


def row_of(
    question: str, query: str, answer: str, worked: list[tuple[str, str, str]]
) -> dict[str, Any]:
    """One question as a row in verl's schema, with its query for whoever reads the rows."""
    return {
        "data_source": "sql_agent",
        "prompt": [
            {"role": "system", "content": SYSTEM},
            *(message for one in worked for message in answered(*one)),
            {"role": "user", "content": question},
        ],
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"db_id": "books", "query": query},
    }


def answered(question: str, query: str, answer: str) -> list[dict[str, str]]:
    """A question and the text of a trajectory that answers it."""
    column = query.split()[1]
    reminder = "<reminder>You have 1 turns left to complete the task.</reminder>"
    observation = (  # as the server writes it
        f"\n\n<observation>{column}\n{answer}\n{reminder}</observation>\n\n"
    )
    text = f"<sql>{query}</sql>{observation}The answer is {answer}."
    return [{"role": "user", "content": question}, {"role": "assistant", "content": text}]


if __name__ == "__main__":
    main()
