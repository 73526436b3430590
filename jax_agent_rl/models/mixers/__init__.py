"""Sequence mixers: one module for each; ``table`` names them."""
