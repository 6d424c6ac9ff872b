"""Published tables and figures beside our results: tables (as data) → reading (a figure of a run) →
pivot, pictures.

The data are `presets/papers/*.toml`; `cli.paper` plans and starts the runs of a table. Plain files
only, no JAX.
"""
