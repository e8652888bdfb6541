"""The embedded procedural tasks, which need no download: one file each, listed in catalogue."""
