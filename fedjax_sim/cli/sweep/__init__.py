"""`fedjax-sim sweep`: plan (what there is to run) → jobs (what is left of it) → queue with local,
on_ray or slurm → table.

Every run is a process of its own, `fedjax-sim sweep FILE --out DIR --task i`, wherever it is
started; what it leaves in the folder is all that anybody knows of it.
"""
