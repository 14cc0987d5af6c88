"""`python -m clipcil` and the script `clipcil`."""

import signal


def main() -> None:
    """Run a command; Ctrl-C during the imports, before `cli.main` handles it, ends the process and prints nothing."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from clipcil.cli import main as run

    run()


if __name__ == "__main__":  # processes that a grid starts import this module, too
    main()
