"""The Python forms of the commands, and what a notebook shows: tables, pictures, comparisons,
sweeps."""
