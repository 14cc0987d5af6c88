"""`python -m clipcil` is `clipcil`."""

from clipcil.cli import main

if __name__ == "__main__":  # processes that a grid starts import this module, too
    main()
