"""Reports on runs: metrics files, metrics of one step, learning curves, comparisons of runs."""
