"""Keep the large buffers of a training step instead of returning them to the kernel after every step."""

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_LARGEST_INT = 2**31 - 1


def keep_freed_memory() -> bool:
    """Tell glibc's allocator to reuse freed memory; returns whether it took effect (False on other C libraries).

    Without this, every step gives its activations back and faults them in again. The process's peak memory does not
    change; it stays at its peak.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _LARGEST_INT), (_M_TOP_PAD, 64 * 2**20))
    return all(mallopt(option, value) == 1 for option, value in settings)
