"""The errors nbverify raises.  Each message names what was wrong, what was expected and what came."""


class NbverifyError(Exception):
    """Base class of every error that nbverify raises on purpose."""


class ArgumentError(NbverifyError, ValueError):
    """A wrong argument, found before anything was launched.  The message reads ``name: expected ..., got ...``."""

    def __init__(self, name: str, expected: str, got: object):
        self.argument, self.expected, self.got = name, expected, str(got)
        super().__init__(f"{name}: expected {expected}, got {got}")

    def __reduce__(self) -> tuple:
        """Worker processes send their errors by pickle, which would call the class with the message alone."""
        return ArgumentError, (self.argument, self.expected, self.got)


class CompileError(NbverifyError, RuntimeError):
    """A kernel could not be compiled or linked, or what came out is not what the contract says."""


class DriverError(NbverifyError, RuntimeError):
    """The CUDA driver refused a call.  The message names the call, the code and, where known, the way out."""


class DeviceInputError(NbverifyError, ValueError):
    """``plan.check()`` of a ``debug=True`` plan: a device buffer holds a value that the contract forbids."""


class DeadlockError(NbverifyError, RuntimeError):
    """The emulator found threads waiting at a barrier that the others will never reach."""


class MemoryAccessError(NbverifyError, IndexError):
    """The emulator found an access outside an array, or one that the GPU would refuse as misaligned."""
