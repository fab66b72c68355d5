"""What can go wrong in a way that the user can mend."""


class UsageError(ValueError):
    """Bad input. The message is one line: what was given, what is allowed, what to do. Commands exit with code 2."""
