"""What tells a mistake that somebody can mend from a defect of this program. Any layer may import it."""


class UserError(ValueError):
    """A mistake of the user, in a file, or of the machine. Its message is one line for the user: the value
    seen, the values allowed, and the fix. A plain ValueError is a defect: the command line asks for a
    report."""
