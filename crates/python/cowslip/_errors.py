"""Exceptions: each is an ``OSError`` with ``errno`` and words that name file, structure, offset."""


class Error(OSError):
    """A failure of the engine or of the system."""


class NotFoundError(Error, FileNotFoundError):
    """A file, or a snapshot, is not there."""


class ExistsError(Error, FileExistsError):
    """A file that was to be made is there already."""


class DeniedError(Error, PermissionError):
    """The system, or the policy for files that images name, does not allow it."""


class ReadOnlyError(Error, PermissionError):
    """A change of something that was opened for reading."""


class PassphraseError(Error, PermissionError):
    """The image is encrypted, and its passphrase is missing or wrong."""


class LockedError(Error, BlockingIOError):
    """Another program, or another handle, uses the image in a way that conflicts."""


class CorruptError(Error):
    """The image contradicts the specification or itself. Nothing was changed."""


class UnsupportedError(Error):
    """The image or the request needs something that is not supported."""


class OpenError(Error):
    """An image, or a file that an image names, cannot be opened."""


class InvalidError(Error, ValueError):
    """A request that makes no sense: beyond the end, contradictory options."""


class LatchedError(Error):
    """An earlier failure makes writes unsafe until the image is opened again."""


class OverwriteError(Error):
    """A write would change a file that is read."""


class CancelledError(Error):
    """The job was cancelled. Its work is undone, or sound as far as it went."""
