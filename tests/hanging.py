"""A call into a C library that never returns."""

import ctypes


def hang_in_c() -> None:
    """Locks a mutex twice. As in a long computation, a signal neither ends the call nor runs Python's handler."""
    mutex = ctypes.create_string_buffer(64)  # PTHREAD_MUTEX_INITIALIZER
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
