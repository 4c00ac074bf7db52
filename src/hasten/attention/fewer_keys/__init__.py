"""Attention to fewer keys than there are tokens: pooled, projected, sorted, or through landmarks."""
