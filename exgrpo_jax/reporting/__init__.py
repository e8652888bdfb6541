"""What a run writes down and draws: metrics, step statistics, curves, comparisons."""
