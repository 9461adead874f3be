"""Entry point of `python -m dtt`, which is the same as the command `dtt`."""

from dtt.main import main

main()
