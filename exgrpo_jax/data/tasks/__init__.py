"""Embedded procedural tasks, which need no download; catalogue lists them."""
