"""The command line: main → parser → commands (settings, registries) → `runner`; `describe` makes
what is printed."""
