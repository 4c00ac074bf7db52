"""Transformers made fast, and measured."""
