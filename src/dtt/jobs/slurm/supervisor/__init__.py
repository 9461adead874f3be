"""The supervisor of a Slurm job: it starts the processes, passes on stop requests and decides
whether the job continues.

Each job directory holds a copy, which the job script executes on the first node: before any set-up
and outside of a container. So it needs only that node's own Python, 3.6 or newer, and imports
nothing but the standard library.
"""
