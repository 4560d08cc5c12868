"""`python -m frameloom` is the command `frameloom`."""

from frameloom.cli.main import main

main()
