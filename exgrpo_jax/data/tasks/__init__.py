"""Built-in procedural tasks, which need no download. catalogue.py lists them."""
