"""Figures of one or several runs, a file each; exgrpo_jax/figures.py is their command."""
