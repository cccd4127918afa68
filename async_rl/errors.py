"""The one base of errors that a person is meant to read."""


class AsyncRLError(Exception):
    """What went wrong, where, and what to do about it, in one message; printed without a traceback (see --debug)."""


class NeedsRestart(AsyncRLError):
    """This process cannot go on, while it would if it were started again: it ends with EXIT_AGAIN
    (async_rl.run.process), and whoever started it does so."""
