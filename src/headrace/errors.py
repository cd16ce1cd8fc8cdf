"""What a user can get wrong."""


class InputError(ValueError):
    """A bad argument, file or checkpoint. The message is one sentence that names the argument, the value it had
    and what was expected; the command line prints it and exits with code 2."""


class GateWarning(UserWarning):
    """A gate was asked for where it cannot act, or hardly."""
