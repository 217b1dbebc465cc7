"""Define the errors that stepwell raises.

    StepwellError                  the world failed, and a caller had asked for the result
    ├── TierIOError                a system call on a tier's files failed (errno, path, tier)
    ├── ChecksumError              bytes do not have the checksum that was recorded for them
    ├── FingerprintError           a volume or pool is of another geometry, model or shard
    ├── VolumeBusyError            a volume or directory is held by another store
    ├── VolumeError                a volume cannot be used: damaged, wrong size, wrong place
    ├── BudgetError                a tier's capacity cannot be had: too small, too large, no room
    ├── PoisonedError              an assertion of the core failed earlier; the store serves misses only
    └── DeviceResetError           the device pool was lost in a failed step; its pages are gone
    StepwellUsageError (ValueError)  misuse: raised at once, nothing changed
    ├── GeometryError              arrays and geometry do not fit (the message names both)
    ├── TokenError                 tokens of a wrong dtype or range
    ├── StalePoolError             a pool handle of an earlier step
    ├── LeaseClosedError           a lease, match or sequence used after its end, or ended twice
    ├── StoreClosedError           the store was used after close
    └── ForkedError                the store was used in a forked child; use spawn

Expected outcomes (miss, pending, full, duplicate) are values, never exceptions.
"""

from __future__ import annotations


class StepwellError(Exception):
    """Report that the world failed where a caller had asked for the result."""


class TierIOError(StepwellError, OSError):
    """Report that a system call on a tier's files failed."""


class ChecksumError(StepwellError):
    """Report bytes that do not have the checksum recorded for them."""


class FingerprintError(StepwellError):
    """Report a volume or pool of another geometry, model, revision or shard."""


class VolumeBusyError(StepwellError):
    """Report a volume or directory that another store holds."""


class VolumeError(StepwellError):
    """Report a volume or directory that cannot be used, and why."""


class BudgetError(StepwellError):
    """Report a capacity that cannot be had, with the numbers."""


class PoisonedError(StepwellError):
    """Report that an assertion of the core failed earlier; the store serves misses only."""


class DeviceResetError(StepwellError):
    """Report that the device pool was lost in a failed step."""


class StepwellUsageError(ValueError):
    """Report misuse; nothing was changed."""


class GeometryError(StepwellUsageError):
    """Report arrays that do not fit the geometry; names both."""


class TokenError(StepwellUsageError):
    """Report tokens of a wrong dtype, shape or range."""


class StalePoolError(StepwellUsageError):
    """Report a pool handle of an earlier step."""


class LeaseClosedError(StepwellUsageError):
    """Report a lease used after its end, or ended twice."""


class StoreClosedError(StepwellUsageError):
    """Report a store used after close."""


class ForkedError(StepwellUsageError):
    """Report a store used in a forked child."""
