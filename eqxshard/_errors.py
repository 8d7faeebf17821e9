"""The errors meant for users: one sentence says what is wrong, and one what to do."""


class UsageError(ValueError):
    """A mistake in how something is used, such as options that contradict each other.

    This library raises it for every wrong value. Raise it in a script or a model of your
    own, with a sentence that says what is wrong and what to do. [`eqxshard.cli`][] prints
    the sentence alone, and ends with exit status 2. It takes other errors for bugs, and
    shows their traceback.

    !!! Example

        ```python
        if args.rank < 1:
            raise eqxshard.UsageError(f"--rank {args.rank} is too small; use 1 or more.")
        ```
    """


class UsageTypeError(TypeError):
    """The same for a value of the wrong type. As in Python, it is not a `ValueError`."""


class UsageOSError(UsageError, OSError):
    """The same for a file that cannot be written."""


class UsageFileError(UsageOSError, FileNotFoundError):
    """The same for a file or a folder that is not there."""


class NonfiniteError(UsageError, FloatingPointError):
    """The same for training that gave up because values are not finite."""


#: The errors whose message is enough without a traceback.
ON_PURPOSE = (UsageError, UsageTypeError)
