"""The one exception a user of the example is meant to see."""


class InputError(Exception):
    """Report bad input from the user.

    The message is one line that says what was given, what is wrong with it, and how to mend it.
    The main script prints that line and exits with code 2.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))
