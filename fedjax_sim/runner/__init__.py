"""The host's part of a run, from options to files.

config → prepare (autotune) → driver → recorder (figures) → directory, checkpoint, summary
`execute` and `seeds` are the ways in from Python; `facts` and `profile` measure a run that is
prepared. Nothing here speaks to people: that is `cli`.
"""
