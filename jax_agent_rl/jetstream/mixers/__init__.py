"""Sequence mixers of engines: one module for each; ``table`` names them."""
