"""`dtt verify`: compare the layouts of a run with one process, in fp64 on the CPU."""
