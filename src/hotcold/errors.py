"""The error that tells a user's mistake from a defect of this program. Any room may import it."""


class UserError(ValueError):
    """Raised for a mistake of the user, in a file, or of the machine. Its message is one line for the user:
    the value seen, the values allowed, and the fix. Any other ValueError is a defect: the command line asks
    for a report."""
