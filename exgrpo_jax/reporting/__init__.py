"""What a run reports: metrics files, metrics of one step, learning curves, comparisons of runs."""
