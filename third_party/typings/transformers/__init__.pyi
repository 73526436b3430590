# Pyright reads this in place of transformers, whose own `__init__` names thousands of modules:
# binding them takes longer than checking ours. What is imported from it has no type.
from typing import Any

def __getattr__(name: str) -> Any: ...
