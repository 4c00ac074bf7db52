"""Errors a user can act on; the command line prints them as one line and exits with 2."""


class UserError(ValueError):
    """A user's mistake: the message says where, what was found, what is allowed and what to do."""


class MissingExtra(UserError):
    """An optional dependency is absent; the message names the extra that brings it."""

    def __init__(self, package: str, extra: str):
        super().__init__(f"{package} is not installed; run: pip install 'hasten[{extra}]'")


NOT_FINITE = "the model's scores are not numbers (NaN): its weights are too large; train again with a lower rate"
