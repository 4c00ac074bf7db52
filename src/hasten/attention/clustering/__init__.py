"""Attention within buckets and clusters that the data make: a token reads tokens like itself."""
