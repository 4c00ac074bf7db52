"""Attention made linear by association: weights are products of features of query and key."""
