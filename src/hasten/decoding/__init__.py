"""hasten.decoding"""
