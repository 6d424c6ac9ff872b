"""Many experiments in one folder: plan (what there is to run) → folder (what is left of it) → work
(in this process), or queue with local, on_ray or slurm (a process each) → table, pivots.

A process of a sweep is `fedjax-sim sweep DIR/sweep.json --out DIR --task i`, wherever it is
started; what it leaves in the folder is all that anybody knows of it.
"""
