"""The errors that are meant for users: one sentence what is wrong, one what to do."""


class UsageError(ValueError):
    """A mistake in how something is used, such as options that contradict each other.

    Everything that this library raises at a wrong value is one. Raise it in a script, or
    in a model that it makes, with a sentence that says what is wrong and what to do.
    [`eqxshard.cli`][] prints the sentence alone, and ends with exit status 2. Other errors
    are taken for bugs, and shown with their traceback.

    !!! Example

        ```python
        if args.rank < 1:
            raise eqxshard.UsageError(f"--rank {args.rank} is too small; use 1 or more.")
        ```
    """


class UsageTypeError(TypeError):
    """The same for a value of the wrong type; not a `ValueError`, as Python has it."""


class UsageOSError(UsageError, OSError):
    """The same for a file that cannot be written."""


class UsageFileError(UsageOSError, FileNotFoundError):
    """The same for a file or a folder that is not there."""


class NonfiniteError(UsageError, FloatingPointError):
    """The same for training that gave up, because values are not finite."""


#: The errors that say all that their reader needs.
ON_PURPOSE = (UsageError, UsageTypeError)
