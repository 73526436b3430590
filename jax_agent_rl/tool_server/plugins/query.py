"""Runs one SQL query on ``database.sqlite`` and prints its rows: runs inside the sandbox, standard library only."""

import json
import os
import sqlite3
import sys


def main() -> None:
    """Read ``{"query", "max_rows"}`` from stdin, and print the result."""
    request = json.load(sys.stdin)
    connection = sqlite3.connect(f"file:{os.path.abspath('database.sqlite')}?mode=ro&immutable=1", uri=True)
    try:
        cursor = connection.execute(request["query"])
        rows = cursor.fetchmany(request["max_rows"] + 1)
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
        print(f"Error: {error}")
        return
    except MemoryError:
        print("Error: out of memory")
        return
    if cursor.description is not None:
        print(" | ".join(column[0] for column in cursor.description))
    for row in rows[: request["max_rows"]]:
        print(" | ".join("NULL" if value is None else str(value) for value in row))
    if len(rows) > request["max_rows"]:
        print(f"(more rows; the first {request['max_rows']} are shown)")
    elif not rows:
        print("(no rows)")


if __name__ == "__main__":
    main()
