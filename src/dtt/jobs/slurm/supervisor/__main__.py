"""Run the copy of this package in a job directory: `python3 jobs/run/supervisor OPTIONS`."""

import sys
from importlib import import_module
from pathlib import Path

# Python has put the package itself on the path; its modules need the folder that holds it.
package = Path(__file__).resolve().parent
sys.path[0] = str(package.parent)
sys.exit(import_module(f"{package.name}.supervise").main(sys.argv[1:]))
