"""The host's part of a run, from settings to files.

config → prepare (autotune) → driver → recorder (figures) → directory, checkpoint, summary
`execute` and `many` start runs; `facts` and `profile` measure a prepared one. Text for the terminal
is in `cli`.
"""
