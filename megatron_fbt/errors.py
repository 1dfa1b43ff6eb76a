"""The errors that end a command, each with its documented exit code."""


class FBTError(Exception):
    """Base of all errors that are reported to the user without a traceback."""

    exit_code = 1


class ConfigError(FBTError):
    """A configuration value is wrong; the message names field, value and remedy."""

    exit_code = 2


class DataError(FBTError):
    """Input data, a tokenizer or an indexed data set is unusable."""

    exit_code = 3


class MissingDataError(DataError):
    """A data set is not there, as where a run is planned on another machine."""


class CheckpointError(FBTError):
    """A checkpoint cannot be written, found or read."""

    exit_code = 4


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is incomplete or is not what was written; an earlier one may do."""


class BadNumbersError(FBTError):
    """Too many steps in a row had a non-finite loss or gradient."""

    exit_code = 5


class StoppedBySignal(FBTError):
    """A signal asked the run to stop; a checkpoint was written and the run can be resumed."""

    exit_code = 75
