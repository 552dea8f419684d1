"""Measurements: each module runs as `python -m benchmarks.<name>`, prints a table and leaves JSON in results/."""
