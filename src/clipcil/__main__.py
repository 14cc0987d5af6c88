"""`python -m clipcil` is `clipcil`."""

from clipcil.cli import main

main()
