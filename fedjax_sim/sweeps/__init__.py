"""Many experiments in one folder: plan (the list of runs) → folder (their status) → work (in this
process), or queue with launchers (a process each) → table, pivots.

A process of a sweep is `fedjax-sim sweep DIR/sweep.json --out DIR --task i`, on any machine; it
communicates only through files in the folder.
"""
