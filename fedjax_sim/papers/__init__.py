"""Published tables and figures beside ours: tables (as data) → reading (a figure of a run) → pivot,
pictures.

The data are `presets/papers/*.toml`; which runs a table needs, and running them, is `cli.paper`.
Plain files only, no JAX.
"""
