"""The compiled program: one round for every method, T rounds in one call. Knows no method by
name."""
