"""`python -m dtt` is `dtt`."""

from dtt.main import main

main()
