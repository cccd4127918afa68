"""The one base of errors that a person is meant to read."""


class AsyncRLError(Exception):
    """What went wrong, where, and what to do about it, in one message; printed without a traceback (see --debug)."""
