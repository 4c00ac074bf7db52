"""Limits of options that several verbs have."""

MOST_THREADS = 1024
"""Threads above which the thread library of PyTorch is known to crash are refused."""
