"""Benchmarks: one script per claim. Each prints its table and can write JSON with the machine's
facts."""
