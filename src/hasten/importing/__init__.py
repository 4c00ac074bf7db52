"""Models that were made elsewhere, as runs of this package."""
