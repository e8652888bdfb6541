"""Reports on runs: metrics files, per-step metrics, learning curves, run comparisons."""
