"""What several tests use: real servers on this machine, hostile files, processes, a browser."""
