"""The host's part of a run: options, preparation, segments, files, resume."""
