"""How good each checkpoint is on held-out problems: statistics, metrics.json, plots and report.html."""
