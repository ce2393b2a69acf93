"""The error for a user's mistake, in contrast to a defect of this program. Any package may import it."""


class UserError(ValueError):
    """Raised for a mistake of the user, in a file, or of the machine. Its message is one line for the user:
    the value seen, the values allowed, and the fix. Any other ValueError is a defect: the command line asks
    for a report."""
